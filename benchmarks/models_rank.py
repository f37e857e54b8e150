"""What a rank does for one cell of the matrix: train under one system, and compare.

The reference is what data parallelism computes, by one process without any: each rank's part of the
batch goes through the plain model alone, with the buffers that this rank would have (running
statistics are each rank's own), and the gradients are averaged. For a loss that is a mean over
equally many independent rows that is the gradient of the whole batch; for BatchNorm, losses over
the labelled tokens only, contrastive and load-balancing losses it is not, and need not be.
"""

from __future__ import annotations

import math
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models_cell import RANKS
from models_rows import MODELS
from models_zoo import Batch, Sample
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import simplefsdp.compiler.backend
from simplefsdp import simple_fsdp
from simplefsdp.compiler.observers import CompiledGraph, observing

STEPS = 3
LEARNING_RATE = 1e-3
FLOOR = 1e-3  # of the largest gradient of the model: see `difference`

FORMULA = (
    "largest, over steps and parameters, of max |got - wanted| / max(max |wanted|, "
    f"{FLOOR:g} * the largest |wanted| of all parameters in that step)"
)
# Some gradients are zero but for rounding, as that of a bias of keys, which softmax ignores; the
# floor keeps their noise from counting.


class Step(NamedTuple):
    """One training step: the loss, mean over ranks, and the full gradients by FQN."""

    loss: float
    gradients: dict[str, Tensor | None]


@dataclass
class Launches:
    """Data-parallel collectives in all graphs that were compiled, before and after the passes."""

    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)

    def see(self, seen: CompiledGraph) -> None:
        for program, found in (
            (seen.rehearsal.reading.program, self.before),
            (seen.rehearsal.after, self.after),
        ):
            collectives = (op.collective for _, op in program.starts())
            found.update(c.kind for c in collectives if c is not None and c.fqns)


def part(batch: Batch, rank: int) -> Batch:
    """A rank's rows of a batch; what has no rows is everybody's."""
    return {
        name: value.tensor_split(RANKS)[rank] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def build(name: str) -> Sample:
    torch.manual_seed(0)
    return MODELS[name].build()


def batches(sample: Sample) -> list[Batch]:
    """One per step, the same on all ranks."""
    torch.manual_seed(1)
    return [sample.batch() for _ in range(STEPS)]


def loss_of(model: nn.Module, batch: Batch, seed: int) -> Tensor:
    """The model's own loss, or else the mean square of its first output.

    Generators are seeded, since some models draw masks even without dropout.
    """
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return loss if loss is not None else output[0].float().square().mean()


def reference(model: nn.Module, data: Sequence[Batch]) -> list[Step]:
    """The steps of one process without parallelism; see the head of this file."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    buffers = dict(model.named_buffers())
    of_rank = [{fqn: b.clone() for fqn, b in buffers.items()} for _ in range(RANKS)]
    steps = []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        losses = []
        for rank in range(RANKS):
            _copy(buffers, of_rank[rank])
            loss = loss_of(model, part(batch, rank), index)
            (loss / RANKS).backward()
            losses.append(loss.item())
            of_rank[rank] = {fqn: b.clone() for fqn, b in model.named_buffers()}
        steps.append(Step(sum(losses) / RANKS, _gradients(model)))
        optimizer.step()
    return steps


def _copy(to: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for fqn, buffer in to.items():
        buffer.copy_(values[fqn])


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {}
    for fqn, param in model.named_parameters():
        grad = param.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[fqn] = None if full is None else full.clone()
    return found


def train(model: nn.Module, data: Sequence[Batch], clock: list[tuple[float, float]]) -> list[Step]:
    """The steps on this rank's rows; what each forward and backward takes is added to ``clock``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        began = _clock()
        loss = loss_of(model, part(batch, dist.get_rank()), index)
        loss.backward()
        clock.append(tuple(b - a for a, b in zip(began, _clock(), strict=True)))  # type: ignore
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        steps.append(Step(mean.item() / RANKS, _gradients(model)))
        optimizer.step()
    return steps


def _clock() -> tuple[float, float]:
    """Wall time, and CPU time of this process and of the compilers that it waited for."""
    t = os.times()
    return time.perf_counter(), t.user + t.system + t.children_user + t.children_system


def difference(got: Sequence[Step], wanted: Sequence[Step]) -> dict[str, Any]:
    """How far apart two runs are: :data:`FORMULA`, losses likewise; gradients that one lacks.

    Zeros for an absent gradient are told apart: torch.compile itself makes them, where an output of
    a graph leads to no loss (an optimizer with weight decay sees a difference).
    """
    worst, where, one_sided, zeros = 0.0, "", set(), set()
    for mine, theirs in zip(got, wanted, strict=True):
        sizes = {f: g.abs().max().item() for f, g in theirs.gradients.items() if g is not None}
        largest = max(sizes.values())
        for fqn, grad in theirs.gradients.items():
            ours = mine.gradients[fqn]
            if ours is None or grad is None:
                if grad is None and ours is not None and not ours.any():
                    zeros.add(fqn)
                elif ours is not grad:
                    one_sided.add(fqn)
                continue
            apart = (ours.double() - grad.double()).abs().max().item()
            error = apart / max(sizes[fqn], FLOOR * largest, 1e-30)
            if math.isnan(error):
                error = math.inf
            if error > worst:
                worst, where = error, fqn
    losses = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(got, wanted, strict=True)]
    return {
        "gradient": worst,
        "gradient_of": where,
        "loss": max(losses),
        "absent_differs": sorted(one_sided),
        "zero_for_absent": sorted(zeros),
    }


def rounding(name: str, data: Sequence[Batch], wanted: Sequence[Step]) -> float | None:
    """How far the reference is from itself in fp64, as :func:`difference` has it.

    A ResNet whose BatchNorm sees a handful of values is at the mercy of rounding: no other program
    can be expected to be closer than this. None for a model that is not all fp32, or names dtypes.
    """
    doubled = [
        {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in b.items()
        }
        for b in data
    ]
    model = build(name).model
    if any(param.dtype != torch.float32 for param in model.parameters()):
        return None
    try:
        exact = reference(model.double(), doubled)
    except (RuntimeError, TypeError):  # it names a dtype itself
        return None
    return difference(wanted, exact)["gradient"]


def shard_as_fsdp2(model: nn.Module) -> nn.Module:
    """FSDP2 on each element of the outermost lists of modules, then on the root: its usual use."""
    mesh = init_device_mesh("cpu", (RANKS,))
    done: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{d}.") for d in done):
            done.append(path)
            for block in module:
                if any(True for _ in block.parameters()) and not isinstance(block, nn.ModuleList):
                    fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def compiled(model: nn.Module, system: str, executor: str) -> Iterator[Launches]:
    """Shard and compile ``model`` in place. ``system``: a bucketing of ours, or ``"fsdp2"``."""
    launches = Launches()
    with observing(launches.see):
        if system == "fsdp2":
            backend = "inductor" if executor == "regions" else executor
            shard_as_fsdp2(model).compile(backend=backend)
        else:
            simple_fsdp(model, init_device_mesh("cpu", (RANKS,)))
            options = {"executor": executor, "bucketing": system}
            model.compile(backend=simplefsdp.compiler.backend.simplefsdp, options=options)
        yield launches


# Else compiled code draws numpy's numbers (SpecAugment's masks) from torch's generator, and so
# others than the reference.
@torch._dynamo.config.patch(use_numpy_random_stream=True)
def compare(name: str, system: str, executor: str) -> dict[str, Any]:
    """One cell: what was found, or the error of it."""
    sample = build(name)
    data = batches(sample)
    found: dict[str, Any] = {"silenced": sample.silenced}
    wanted = reference(sample.model, data)
    found["rounding"] = rounding(name, data, wanted)
    model = build(name).model
    counters.clear()
    clock: list[tuple[float, float]] = []
    launches = Launches()
    try:
        with compiled(model, system, executor) as launches:
            found |= difference(train(model, data, clock), wanted)
            found["losses"] = [step.loss for step in wanted]
        # A model may be compiled again in the second step, so what all took beyond the last.
        found["compile_s"], found["compile_cpu_s"] = (
            round(sum(of) - len(of) * of[-1], 2) for of in zip(*clock, strict=True)
        )
    except Exception as error:
        found |= failure(error)
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())
    found["break_reasons"] = [reason.strip().splitlines()[0] for reason in counters["graph_break"]]
    if system != "fsdp2":
        found["collectives"] = dict(launches.before)
        found["buckets"] = dict(launches.after)
    return found


def failure(error: BaseException) -> dict[str, Any]:
    """An error in few words: what it was at the bottom, where, and all of it."""
    while (deeper := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = deeper
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    said = (str(error).strip().splitlines() or [""])[0]
    return {
        "error": f"{type(error).__name__}: {said}",
        "at": last,
        "trace": "".join(traceback.format_exception(error)),
    }
