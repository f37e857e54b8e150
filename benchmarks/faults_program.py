"""A program of a user's own, that ``faults_ranks.py`` starts on each rank and disturbs.

python faults_program.py EXECUTOR GROUP_TIMEOUT_S GUARD_TIMEOUT_S ODDITY

What is odd: nothing, branches (rank 1 leaves out a layer), width (rank 1 has another), float8, or
complex (what the last layer's weight is).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp.rank_guard import RankMismatchError

_DTYPES = {"float8": torch.float8_e4m3fn, "complex": torch.complex64}


class _Cast(nn.Linear):
    """A layer that computes in the dtype of its weight, and gives real numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return (x.to(weight.dtype) @ weight.t()).real + self.bias


class Model(nn.Module):
    """Layers alike, but for what is odd."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
        other = dist.get_rank() == 1
        self.skip = 7 if oddity == "branches" and other else None
        if oddity == "width" and other:
            self.layers[7] = nn.Linear(64, 32)
        if oddity in _DTYPES:
            self.layers[7] = last = _Cast(64, 64)
            last.weight = nn.Parameter(last.weight.detach().to(_DTYPES[oddity]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = layer(x).relu()
        return x


def main() -> int:
    """One step; the exit code."""
    executor, group_timeout_s, guard_s, oddity = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=float(group_timeout_s)))
    try:
        model = simple_fsdp(Model(oddity), DeviceMesh.from_group(group, "cpu"))
    except (ValueError, RankMismatchError) as error:
        print(f"rank {rank}: {error}", flush=True)
        dist.barrier()  # with rank 0 goes the store that the other may still be joining by
        return 2 if isinstance(error, ValueError) else 3
    if executor != "eager":
        options = {"executor": executor, "rank_guard_timeout_s": float(guard_s)}
        model.compile(backend="simplefsdp", options=options)
    print(f"rank {rank}: begins", flush=True)
    try:
        model(torch.ones(4, 64)).sum().backward()
    except RankMismatchError as error:
        print(f"rank {rank}: {error}", flush=True)
        return 3
    except RuntimeError as error:
        print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
        print(*getattr(error, "__notes__", []), sep="\n", flush=True)
        return 4
    print(f"rank {rank}: done", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a rank that gave up does not wait for the others
