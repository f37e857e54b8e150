"""What the compiled graphs communicate: one gather and one reduce per parameter, by provenance."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import STARTS, Captured, calls, capture, gathers, no_kernels, reduces
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from zoo import Small, Zoo, batch, loss_of

from simplefsdp import init_weights, provenance, simple_fsdp
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama

_ops = torch.ops._c10d_functional
NONE = {"bucketing": "none"}  # the graphs are captured before the passes


def compile_step(model: nn.Module, executor: str = "aot_eager") -> Captured:
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": executor}
        )
        loss_of(compiled, *batch(0, 1)).backward()
    assert len(captured.forward) == len(captured.backward) == 1
    return captured


def sharded_fqns(model: nn.Module, *, trainable: bool = False) -> list[str]:
    return sorted(
        fqn
        for fqn, p in model.named_parameters()
        if p.dim() > 0 and (p.requires_grad or not trainable)
    )


@pytest.mark.slow(quick=["reshard-checkpointed"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_one_gather_and_one_reduce_per_parameter(fake_mesh, reshard, recompute):
    model = simple_fsdp(Zoo(recompute=recompute), fake_mesh(4), reshard_after_forward=reshard)
    captured = compile_step(model)
    forward, backward = captured.forward[0], captured.backward[0]
    assert sorted(gathers(forward)) == sharded_fqns(model)
    trainable = [fqn for fqn, p in model.named_parameters() if p.requires_grad]
    assert sorted(reduces(backward)) == sorted(trainable)
    again = gathers(backward)
    if reshard:
        assert len(again) == len(set(again))
        assert {"embed.weight", "blocks.0.up.weight", "frozen.weight", "tiny"} <= set(again)
    else:
        assert again == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
def test_collectives_of_the_other_modes(fake_mesh, mode):
    mesh = fake_mesh(2, 2) if mode == "hybrid_shard" else fake_mesh(4)
    model = simple_fsdp(Zoo(), mesh, mode=mode)
    captured = compile_step(model)
    trainable = [fqn for fqn, p in model.named_parameters() if p.requires_grad]
    reduced = reduces(captured.backward[0])
    if mode == "replicate":
        assert gathers(captured.forward[0]) == gathers(captured.backward[0]) == []
        assert sorted(reduced) == sorted(trainable)
    else:
        assert sorted(gathers(captured.forward[0])) == sharded_fqns(model)
        # within the shard group, then across; a scalar is a copy on both mesh dimensions
        assert sorted(reduced) == sorted(trainable * 2)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_full_parameters_are_saved_for_backward_only_if_kept(fake_mesh, reshard):
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    simple_fsdp(model, fake_mesh(4), reshard_after_forward=reshard)
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(torch.randn(2, 16, requires_grad=True)).sum().backward()
    outputs = captured.forward[0].graph.output_node().args[0]
    sizes = [o.meta["val"].numel() for o in outputs if isinstance(o.meta.get("val"), torch.Tensor)]
    # both weights have 16 * 64 elements; activations have at most 2 * 64
    assert sum(size == 16 * 64 for size in sizes) == (0 if reshard else 2)


def _save_matmuls(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


class Selective(nn.Module):
    """Blocks under the user's own selective activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)]
        )

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


@pytest.mark.slow(quick=["reshard-aot_eager", "keep-aot_eager"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_selective_activation_checkpointing(fake_mesh, reshard, executor):
    model = simple_fsdp(Selective(), fake_mesh(4), reshard_after_forward=reshard)
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": executor}
        )
        compiled(torch.randn(2, 8, requires_grad=True)).sum().backward()
    weights = [f"layers.{i}.0.weight" for i in range(3)]
    assert sorted(gathers(captured.forward[0])) == weights
    assert sorted(gathers(captured.backward[0])) == (weights if reshard else [])
    # the user's policy still holds: no matmul of forward is done again in backward
    assert len(calls(captured.backward[0], torch.ops.aten.mm.default)) == 2 * 3


@pytest.mark.slow
def test_every_node_of_a_chain_carries_its_fqn(fake_mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(Zoo(), fake_mesh(4), mp_policy=policy)
    captured = compile_step(model)
    forward, backward = captured.forward[0], captured.backward[0]
    for gm, fqn_of, start in (
        (forward, provenance.gathered_fqn, _ops.all_gather_into_tensor.default),
        (backward, provenance.gathered_fqn, _ops.all_gather_into_tensor.default),
        (backward, provenance.reduced_fqn, _ops.reduce_scatter_tensor.default),
    ):
        starts = [n for n in calls(gm, start) if fqn_of(n)]
        assert starts
        for node in starts:
            (wait,) = node.users
            assert wait.target is _ops.wait_tensor.default
            assert fqn_of(wait) == fqn_of(node)
            source = node.all_input_nodes[0]
            while source.op != "placeholder" and fqn_of(source):
                assert fqn_of(source) == fqn_of(node)
                source = source.all_input_nodes[0]
    # bytes on the wire are in param_dtype, reductions in reduce_dtype
    for node in calls(forward, _ops.all_gather_into_tensor.default):
        assert node.meta["val"].dtype == torch.bfloat16
    for node in calls(backward, _ops.reduce_scatter_tensor.default):
        assert node.meta["val"].dtype == torch.float32


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_tensor_parallel_collectives_are_left_alone(fake_mesh, reshard):
    mesh = fake_mesh(2, 2, names=("dp", "tp"))
    model = TwoLayers()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    simple_fsdp(model, mesh["dp"], reshard_after_forward=reshard)
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(torch.randn(2, 8, requires_grad=True)).sum().backward()
    forward, backward = captured.forward[0], captured.backward[0]
    assert sorted(gathers(forward)) == ["down.weight", "up.weight"]
    assert sorted(gathers(backward)) == (["down.weight", "up.weight"] if reshard else [])
    assert sorted(reduces(backward)) == ["down.weight", "up.weight"]
    for gm in (forward, backward):
        (tensor_parallel,) = calls(gm, _ops.all_reduce.default)
        assert provenance.reduced_fqn(tensor_parallel) is None
        assert tensor_parallel.args[2] == mesh["tp"].get_group().group_name


def test_gather_shared_by_two_checkpointed_regions(fake_mesh):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = checkpoint(self.layer, x, use_reentrant=False)
            return checkpoint(self.layer, x, use_reentrant=False)

    model = simple_fsdp(Shared(), fake_mesh(4))
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(torch.randn(2, 8)).sum().backward()
    assert sorted(gathers(captured.forward[0])) == ["layer.bias", "layer.weight"]
    assert sorted(reduces(captured.backward[0])) == ["layer.bias", "layer.weight"]


class Target(nn.Module):
    """Reads its encoder without gradients first, then with (BYOL, DPO, target networks)."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.encoder = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            target = self.read(x)
        return (self.read(x + 1) - target).square().mean()

    def read(self, x):
        return (
            checkpoint(self.encoder, x, use_reentrant=False) if self.recompute else self.encoder(x)
        )


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_a_read_without_gradients_takes_none_from_the_others(fake_mesh, recompute):
    plain = Target(recompute)
    x = torch.randn(2, 8)
    plain(x).backward()
    plain.zero_grad()
    model = simple_fsdp(copy.deepcopy(plain), fake_mesh(1))
    model.load_state_dict(plain.state_dict())  # the fake scatter of the wrap leaves garbage
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(x).backward()
    assert len(captured.forward) == 1
    plain(x).backward()
    for fqn, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(fqn).grad.to_local(), param.grad)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_reads_with_and_without_gradients_share_one_gather(fake_mesh, recompute):
    model = simple_fsdp(Target(recompute), fake_mesh(4))
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(torch.randn(2, 8)).backward()
    wanted = ["encoder.bias", "encoder.weight"]
    assert sorted(gathers(captured.forward[0])) == wanted
    assert sorted(reduces(captured.backward[0])) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "build"), [("aot_eager", Zoo), ("inductor", Small)])
def test_ranks_agree_on_the_order_of_collectives(fake_mesh, executor, build):
    orders = set()
    for rank in (0, 3):  # 3 holds smaller and empty shards
        torch._dynamo.reset()
        model = simple_fsdp(build(), fake_mesh(4, rank=rank))
        with no_kernels():
            captured = compile_step(model, executor)
        forward, backward = captured.forward[0], captured.backward[0]
        order = [n for gm in (forward, backward) for n in calls(gm, *STARTS)]
        orders.add(tuple(str(n.target) + str(n.meta["custom"]) for n in order))
        dist.destroy_process_group()
    assert len(orders) == 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.dropout(x, 0.1)


@pytest.mark.slow(quick=["aot_eager"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_checkpointed_attention_and_dropout_run(fake_mesh, executor):
    """Torch 2.12 and 2.13 fail on random CPU ops in a checkpointed region beside DTensors."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention(), Attention()])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = simple_fsdp(Layers(), fake_mesh(4))
    compiled = torch.compile(
        model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": executor}
    )
    with capture() as captured:
        compiled(torch.randn(2, 6, 8, requires_grad=True)).sum().backward()
    weights = ["layers.0.qkv.weight", "layers.1.qkv.weight"]
    assert set(weights) <= set(gathers(captured.backward[0]))


def test_no_grad_graph_has_gathers_only(fake_mesh):
    model = simple_fsdp(Zoo(), fake_mesh(4))
    with capture() as captured, torch.no_grad():
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(batch(0, 1)[0])
    assert sorted(gathers(captured.forward[0])) == sharded_fqns(model)
    assert captured.backward == []


@pytest.mark.slow(quick=["reshard-selective", "keep-none"])
@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_a_llama(fake_mesh, reshard, activation_checkpointing):
    config = replace(CONFIGS["debug"], n_layers=1)
    with torch.device("meta"):
        model = Llama(config, activation_checkpointing=activation_checkpointing)
    init_weights(simple_fsdp(model, fake_mesh(2), reshard_after_forward=reshard))
    with capture() as captured:
        compiled = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**NONE, "executor": "aot_eager"}
        )
        compiled(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    parameters = sorted(fqn for fqn, _ in model.named_parameters())
    assert len(parameters) == 12
    assert sorted(gathers(captured.forward[0])) == parameters
    assert sorted(reduces(captured.backward[0])) == parameters
    again = gathers(captured.backward[0])
    # the embedding's backward needs its gradient only
    wanted = [fqn for fqn in parameters if fqn != "embed_tokens.weight"] if reshard else []
    assert sorted(again) == wanted
