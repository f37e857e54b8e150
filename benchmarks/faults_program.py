"""A program of a user's own, that ``faults_ranks.py`` starts on each rank and disturbs.

python faults_program.py COMPILED GROUP_TIMEOUT_S GUARD_TIMEOUT_S BRANCHES
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


class Model(nn.Module):
    """Layers alike; with ``branches`` rank 1 leaves one out."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
        self.skip = 7 if branches and dist.get_rank() == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = layer(x).relu()
        return x


def main() -> int:
    """One step; the exit code."""
    executor, group_timeout_s, guard_s, branches = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=float(group_timeout_s)))
    model = simple_fsdp(Model(branches == "yes"), DeviceMesh.from_group(group, "cpu"))
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
