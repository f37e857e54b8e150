"""What one rank can show of a device: on CPU here, on CUDA where SIMPLEFSDP_TEST_DEVICE says so.

``benchmarks/gpu`` runs this file on a GPU. One rank sends to itself, by NCCL there: its graphs are
those of many ranks, and what they compute is known.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_device import packs_alike
from pack_checks import cases
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from inductor_passes.adapters import devices
from simplefsdp import (
    clip_grad_norm_,
    compile_step,
    init_weights,
    microbatch,
    simple_fsdp,
    unsharded,
)
from simplefsdp.compiler import backend
from simplefsdp.models import LlamaConfig
from simplefsdp.models.llama3 import Llama

DEVICE = os.environ.get("SIMPLEFSDP_TEST_DEVICE", "cpu")
# Inductor's code for CPU is tested elsewhere, and takes a compiler seconds.
EXECUTOR = "inductor" if DEVICE == "cuda" else "aot_eager"
CONFIG = LlamaConfig(
    vocab_size=97, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=96, rope_scaling=None,
    max_seq_len=32,
)  # fmt: skip
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch._dynamo.reset()
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def llama(**options) -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG, **options).to(DEVICE)


def batch(sequences: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(97, (sequences, 33), generator=generator).to(DEVICE)


def loss_of(model, sequences: int = 2) -> Tensor:
    return loss_for(model, batch(sequences))


def loss_for(model, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def compiled(model, mesh, policy=None, **options):
    simple_fsdp(model, mesh, mp_policy=policy)
    options = {"executor": EXECUTOR, "bucketing": "auto", **options}
    # By itself, not by its name, which only an installed package has.
    model.compile(backend=backend.simplefsdp, options=options)
    return model


def check_gradients(model, plain, tolerance: float) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.device.type == DEVICE
        grad = mine.grad.full_tensor()
        assert float((grad - theirs.grad).norm() / theirs.grad.norm()) < tolerance, name


@pytest.mark.slow(quick=["bf16-auto"])
@pytest.mark.parametrize("bucketing", ["none", "manual", "auto"])
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_gradients_are_those_of_the_plain_model(mesh, bucketing, policy):
    plain, model = llama(), llama()
    loss_of(plain).backward()
    compiled(model, mesh, policy, bucketing=bucketing)
    loss_of(model).backward()
    check_gradients(model, plain, 5e-2 if policy else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_what_is_computed_again_gives_the_same(mesh, checkpointing):
    plain, model = llama(), llama(activation_checkpointing=checkpointing)
    loss_of(plain).backward()
    loss_of(compiled(model, mesh)).backward()
    check_gradients(model, plain, 1e-4)


@pytest.mark.slow
def test_a_reduce_on_a_group_of_its_own(mesh):
    plain, model = llama(), llama()
    loss_of(plain).backward()
    loss_of(compiled(model, mesh, separate_reduce_group=True)).backward()
    check_gradients(model, plain, 1e-4)


@pytest.mark.slow
def test_micro_batches_add_up(mesh):
    plain, model = llama(), compiled(llama(), mesh)
    (loss_of(plain, 2) + loss_of(plain, 3)).backward()
    for last, sequences in ((False, 2), (True, 3)):
        with microbatch(model, is_last=last):
            loss_of(model, sequences).backward()
    check_gradients(model, plain, 1e-4)


@pytest.mark.slow
def test_clipping_and_a_step(mesh):
    plain, model = llama(), compiled(llama(), mesh)
    for m in (plain, model):
        loss_of(m).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = clip_grad_norm_(model, 0.1)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-4)
    for m in (plain, model):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_as_one_program(mesh, fused):
    plain, model = llama(), llama()
    simple_fsdp(model, mesh)
    own, others = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused) for m in (plain, model))
    options = {"executor": EXECUTOR, "bucketing": "auto"}
    step = compile_step(partial(loss_for, model), others, max_norm=0.1, options=options)
    for _ in range(3):
        loss = loss_of(plain)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step()
        own.zero_grad()
        found = step(batch())
        torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.grad_norm, norm, rtol=1e-3, atol=1e-5)
    counts = {s["step"].device.type for s in others.state.values()}
    assert counts == {s["step"].device.type for s in own.state.values()}
    loss_of(model).backward()  # afterwards, as torch does it
    others.step()


@pytest.mark.parametrize("bucketing", ["manual", "auto"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.skipif(DEVICE != "cuda", reason="on CPU tested elsewhere")
def test_by_regions(mesh, bucketing, checkpointing):
    plain, model = llama(), llama(activation_checkpointing=checkpointing)
    loss_of(plain).backward()
    loss_of(compiled(model, mesh, bucketing=bucketing, executor="regions")).backward()
    check_gradients(model, plain, 1e-4)


def test_values_are_made_and_written_where_they_are_used(mesh):
    with torch.device("meta"):
        model = Llama(CONFIG)
    simple_fsdp(model, mesh)
    init_weights(model, seed=0)
    assert {p.device.type for p in model.parameters()} == {DEVICE}
    again = copy.deepcopy(model)
    init_weights(again, seed=0)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    with unsharded(model), torch.no_grad():
        model.norm.weight.fill_(3)
    assert isinstance(model.norm.weight, DTensor)
    assert torch.equal(model.norm.weight.full_tensor(), torch.full((64,), 3.0, device=DEVICE))


def test_packs_have_the_bits_of_their_plain_twins():
    found = packs_alike(torch.device(DEVICE))
    assert found.keys() == cases().keys()
    assert {name for name, alike in found.items() if not all(alike.values())} == set()


@pytest.mark.skipif(DEVICE != "cuda", reason="asks the driver")
def test_a_gpu_without_a_preset_is_estimated(monkeypatch):
    monkeypatch.setattr(devices, "DEVICES", {})
    cluster = devices.cluster_of(torch.device(DEVICE))
    assert cluster.source.startswith("estimated")
    assert 0.1 < cluster.memory_gb_s / 1e3 < 20


@pytest.mark.slow
def test_uneven_rows_of_ranks_that_are_not_there(fake_mesh):
    """97 rows on four ranks: the last has fewer, and all have the same graphs."""
    model = llama()
    compiled(model, fake_mesh(4, rank=3, device=DEVICE))
    loss_of(model).backward()
    grad = model.lm_head.weight.grad
    assert grad.shape == (97, 64) and grad.to_local().shape == (22, 64)
    assert grad.device.type == DEVICE
