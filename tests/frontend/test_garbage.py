"""A step leaves no tensors to the garbage collector, which trainers like torchtitan switch off."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from simplefsdp import clip_grad_norm_, microbatch, simple_fsdp

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Sequential):
    checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def of_all_ranks(how: str) -> list[str]:
    torch.manual_seed(0)
    model = Model(*(Block() for _ in range(3)))
    model.checkpoints = "checkpointed" in how
    simple_fsdp(model, init_device_mesh("cpu", (2,)), mp_policy=BF16 if "bf16" in how else None)
    if "compiled" in how:
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for is_last in (False, True) if "accumulated" in how else (True,):
            with microbatch(model, is_last=is_last) if "accumulated" in how else nullcontext():
                model(torch.randn(4, 8)).square().mean().backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    gc.freeze()  # what earlier tests have left
    gc.disable()
    try:
        for _ in range(2):
            step()
        gc.set_debug(gc.DEBUG_SAVEALL)  # what is collected is kept, to be looked at
        gc.collect()
        return [f"{type(o).__name__} {(*o.shape,)}" for o in gc.garbage if isinstance(o, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(
    "how",
    [
        *("eager", "eager bf16", "eager checkpointed", "eager accumulated"),
        *("compiled", "compiled accumulated", "compiled checkpointed"),
    ],
)
def test_steps_leave_no_tensors_to_the_garbage_collector(pools, how):
    assert pools(2).run(of_all_ranks, how) == [[], []]
