"""One of two ranks of part b: steps of small models against one process that has both batches.

python correct_rank.py <rank> <file of the store> <device> <file of the answer> <case>...
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import simplefsdp
from inductor_passes import passes
from inductor_passes.adapters import copies, packs
from simplefsdp.compiler import backend
from simplefsdp.launcher.follow import follow

RANKS = 2
_RATE = 0.1


@dataclass(frozen=True)
class Case:
    """What is computed, and how.

    Attributes:
        options: of the backend; None for no compilation.
        width, hidden, vocab, blocks: of the model.
        hybrid: shards in groups of one rank, copies across two: its reduces are all-reduces.
        checkpointed: the blocks are computed again in backward.
        bf16: parameters and compute in bf16, reduces in fp32.
        packed: every other member of a bucket is packed with others, whatever it costs.
        steps: how many, with SGD between them; the last one's loss and gradients are compared. A
            CUDA graph is made in the second, and replayed from the third on.
    """

    options: dict[str, Any] | None = field(default_factory=dict)
    width: int = 64
    hidden: int = 128
    vocab: int = 96
    blocks: int = 2
    hybrid: bool = False
    checkpointed: bool = False
    bf16: bool = False
    packed: bool = False
    steps: int = 1


# Large buckets, for an H100's latencies, on every device.
_FEW = {"bucketing": "auto", "cluster": "h100"}
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
    "every other member packed": Case(_FEW, hidden=127, blocks=4, bf16=True, packed=True),
    "cudagraphs": Case({**_FEW, "cudagraphs": True}, blocks=1, steps=4),
    "regions": Case({**_FEW, "executor": "regions"}, steps=2),
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
    """Three parameters to nine: a step sends some 10 collectives, and the wrap one for each."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case.width, case.hidden) for _ in range(case.blocks))
        self.head = nn.Linear(case.width, case.vocab, bias=False)
        self._checkpointed = case.checkpointed

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return F.cross_entropy(self.head(x).float(), targets)


def batch(case: Case, rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a rank; the same on every machine."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    x = torch.randn(16, case.width, generator=generator)
    targets = torch.randint(case.vocab, (16,), generator=generator)
    return x.to(device), targets.to(device)


def check(case: Case, device: torch.device, executor: str) -> dict[str, Any]:
    """Steps of the two ranks, against one process; relative errors of the last."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, plain = dist.get_rank(), Net(case).to(device)
    expected_loss, expected = steps_of_one(plain, case, rank, device)
    torch.manual_seed(0)
    before = _collectives()
    model = _wrapped(Net(case).to(device), case, device)
    if case.options is not None:
        options = options_for(case, device, executor)
        # By itself, not by its name, which only an installed package has.
        model.compile(backend=backend.simplefsdp, options=options, fullgraph=True)
    if case.packed:
        with packed(device.type) as called:
            loss = steps(model, case, rank, device)
    else:
        called = Counter()
        loss = steps(model, case, rank, device)
    errors = {name: _error(p, expected[name]) for name, p in model.named_parameters()}
    worst = max(errors, key=errors.__getitem__)
    found = {
        "loss_error": abs(loss / expected_loss - 1),
        "gradient_error": errors[worst],
        "worst": worst,
        "collectives": _collectives() - before,
        "packs": dict(called),
        "not_captured": counters["inductor"]["cudagraph_skips"],
    }
    tolerance = 3e-2 if case.bf16 else 1e-4
    agrees = max(found["loss_error"], errors[worst]) <= tolerance
    ran = len(called) == 3 * case.packed and not found["not_captured"]
    return {**found, "ok": agrees and ran}


def options_for(case: Case, device: torch.device, executor: str) -> dict[str, Any]:
    """Of the backend; on CPU the same steps without CUDA graphs, which are not there, and without
    Inductor, whose code for it takes a compiler half a minute and is tested elsewhere."""
    options = {"executor": executor, **(case.options or {})}
    if device.type != "cuda":
        options["executor"] = executor
        options.pop("cudagraphs", None)
    return options


def steps_of_one(
    plain: nn.Module, case: Case, rank: int, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """One process has the batches of both; the last step's loss of a rank's, and gradients."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=_RATE)
    for step in range(case.steps):
        optimizer.zero_grad()
        losses = [plain(*batch(case, each, step, device)) for each in range(RANKS)]
        (sum(losses) / RANKS).backward()
        if step < case.steps - 1:
            optimizer.step()
    return float(losses[rank].detach()), {name: p.grad for name, p in plain.named_parameters()}


def steps(model: nn.Module, case: Case, rank: int, device: torch.device) -> float:
    """This rank's steps; the last one's loss, and its gradients are left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = model(*batch(case, rank, step, device))
        loss.backward()
        if step < case.steps - 1:
            optimizer.step()
    return float(loss.detach())


@contextmanager
def packed(device_type: str) -> Iterator[Counter[str]]:
    """Every other member shares a buffer; how often each operator ran: before a gather (of one
    row), before a reduce (a row per rank), and after a gather."""
    called: Counter[str] = Counter()

    def pack(members: list[Tensor], rows: int, *rest: Any) -> Tensor:
        called["before a gather" if rows == 1 else "before a reduce"] += 1
        return _operators(device_type).pack(members, rows, *rest)

    def unpack(*args: Any) -> list[Tensor]:
        called["after a gather"] += 1
        return _operators(device_type).unpack(*args)

    with (
        mock.patch.object(copies, "has_kernel", return_value=True),
        mock.patch.object(passes, "has_kernel", return_value=True),
        mock.patch.object(passes, "members_to_pack", lambda some, *_: range(0, len(some), 2)),
        inductor_config.patch(fx_graph_cache=False),  # its key knows nothing of this
        torch.library._scoped_library("inductor_passes", "FRAGMENT") as library,
    ):
        for name, run in (("pack", pack), ("unpack", unpack)):
            library.impl(name, run, device_type.upper(), allow_override=True)
        yield called


def _operators(device_type: str) -> Any:
    """On CUDA the kernel, which is nowhere else, on CPU its plain twin."""
    if device_type != "cuda":
        return packs
    from inductor_passes.adapters import pack_kernels

    return pack_kernels


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
    follow(os.getppid())
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
