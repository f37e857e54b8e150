"""What the tests of integrations train: a small Llama, on sentences with gaps."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import simple_fsdp

EAGER = {"executor": "aot_eager", "bucketing": "none"}


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**size, "tie_word_embeddings": True, **changes}))


def sentences(n):
    """Of which each counts another number of tokens: a mean of means is not the mean."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(n):
        ids = torch.randint(32, (8,), generator=generator)
        labels = ids.clone()
        labels[: i % 7] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def wrapped(model, options=EAGER, **arguments):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    simple_fsdp(model, mesh, **arguments)
    if options is not None:
        model.compile(backend="simplefsdp", options=options)
    return model


def fresh_state():
    """Let accelerate forget earlier tests; a rank is told what torchrun would tell it."""
    from accelerate.state import AcceleratorState, GradientState

    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    gc.freeze()  # accelerate collects garbage in each training: what is there now stays
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def values_of(model):
    """Full parameters by name, of a wrapped model or of a plain one."""
    found = {}
    for name, param in model.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name] = full.detach().clone()
    return found


def assert_equal(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name],
            other[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
