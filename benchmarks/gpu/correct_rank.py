"""One of two ranks of part b: steps of small models against one process that has both batches.

python correct_rank.py <rank> <file of the store> <device> <file of the answer> <case>...
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import simplefsdp
from simplefsdp import backend

RANKS = 2


@dataclass(frozen=True)
class Case:
    """What is computed, and how.

    Attributes:
        options: of the backend; None for no compilation.
        width, hidden, vocab: of the model.
        hybrid: shards in groups of one rank, copies across two: its reduces are all-reduces.
        checkpointed: the blocks are computed again in backward.
        bf16: parameters and compute in bf16, reduces in fp32.
    """

    options: dict[str, Any] | None = field(default_factory=dict)
    width: int = 64
    hidden: int = 128
    vocab: int = 96
    hybrid: bool = False
    checkpointed: bool = False
    bf16: bool = False


CASES = {
    "eager": Case(None),
    "none": Case({"bucketing": "none"}),
    "manual": Case({"bucketing": "manual"}),
    "auto": Case({"bucketing": "auto"}),
    "hybrid eager": Case(None, hybrid=True),
    "hybrid auto": Case({"bucketing": "auto"}, hybrid=True),
    "uneven rows": Case({"bucketing": "auto"}, hidden=127, vocab=97),
    "unaligned width": Case({"bucketing": "auto"}, width=67, vocab=1009),
    "checkpointed in full": Case({"bucketing": "auto"}, checkpointed=True),
    "second group": Case({"bucketing": "auto", "separate_reduce_group": True}),
    "avg in bf16, reduced in fp32": Case({"bucketing": "auto"}, bf16=True),
}


class Block(nn.Module):
    """A residual feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [tokens, width]``."""
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    """Five parameters: a step sends some 15 collectives, and the wrap one for each."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case.width, case.hidden) for _ in range(2))
        self.head = nn.Linear(case.width, case.vocab, bias=False)
        self._checkpointed = case.checkpointed

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return F.cross_entropy(self.head(x).float(), targets)


def batch(case: Case, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a rank; the same on every machine."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(16, case.width, generator=generator)
    targets = torch.randint(case.vocab, (16,), generator=generator)
    return x.to(device), targets.to(device)


def check(case: Case, device: torch.device, executor: str) -> dict[str, Any]:
    """A step of the two ranks, against one process; relative errors."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Net(case).to(device)
    losses = [plain(*batch(case, rank, device)) for rank in range(RANKS)]
    (sum(losses) / RANKS).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.manual_seed(0)
    before = _collectives()
    model = _wrapped(Net(case).to(device), case, device)
    if case.options is not None:
        options = {"executor": executor, **case.options}
        # By itself, not by its name, which only an installed package has.
        model.compile(backend=backend.simplefsdp, options=options, fullgraph=True)
    rank = dist.get_rank()
    loss = model(*batch(case, rank, device))
    loss.backward()
    sent = _collectives() - before
    errors = {name: _error(p, expected[name]) for name, p in model.named_parameters()}
    worst = max(errors, key=errors.__getitem__)
    loss_error = abs(float(loss) / float(losses[rank]) - 1)
    tolerance = 3e-2 if case.bf16 else 1e-4
    return {
        "loss_error": loss_error,
        "gradient_error": errors[worst],
        "worst": worst,
        "collectives": sent,
        "ok": max(loss_error, errors[worst]) <= tolerance,
    }


def _wrapped(model: nn.Module, case: Case, device: torch.device) -> nn.Module:
    shape = (RANKS, 1) if case.hybrid else (RANKS,)
    names = ("replicate", "shard") if case.hybrid else ("dp",)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if case.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mode = "hybrid_shard" if case.hybrid else "fully_shard"
    return simplefsdp.simple_fsdp(model, mesh, mode=mode, mp_policy=policy)


def _error(param: Tensor, expected: Tensor) -> float:
    """Of this rank's rows of a gradient, without a collective."""
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
    mesh = param.device_mesh
    ranks, place = mesh.size(mesh.ndim - 1), mesh.get_coordinate()[-1]
    rows = -(-expected.shape[0] // ranks)
    wanted = expected[rows * place : rows * (place + 1)]
    return float((param.grad.to_local() - wanted).norm() / wanted.norm())


def _collectives() -> int:
    """So many were sent on the first group."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


def main() -> None:
    """Run the cases; the answer is a file."""
    rank, store, device_type, answer, *cases = sys.argv[1:]
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=int(rank),
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    found: dict[str, Any] = {}
    for name in cases:
        try:
            executor = "inductor" if device_type == "cuda" else "aot_eager"
            found[name] = check(CASES[name], device, executor)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"ok": False, "failure": f"{type(error).__name__}: {error}"[:500]}
        Path(answer).write_text(json.dumps(found))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
