"""Running the variants: calibration of the wire, then interleaved rounds."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import wire
from memory import Memory
from memory import measure as measure_memory
from rows import Row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transfers import Transfer, exposed_s, link
from variants import BUILDERS, LlamaLoss, Variant, Workload

Say = Callable[[str], None]
Builders = Mapping[str, Callable[[Workload], Variant]]


@dataclass(frozen=True)
class Turns:
    """Where several benchmarks share a device: each builds within ``shared``, and what is timed is
    within ``alone``. By default there is only one."""

    shared: Callable[[], AbstractContextManager[None]] = nullcontext
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


ONLY_ONE = Turns()


@dataclass(frozen=True)
class Sample:
    """One step of one variant; seconds, bytes."""

    step_s: float  # forward and backward
    optimizer_s: float
    loss: float
    transfers: list[Transfer]

    @property
    def exposed_s(self) -> float:
        """What waits slept."""
        return exposed_s(self.transfers)

    @property
    def wire_s(self) -> float:
        """What the wire was busy."""
        return sum(t.modelled_s for t in self.transfers)

    @property
    def copy_s(self) -> float:
        """What was copied in the place of a NIC, beside everything else."""
        return sum(t.copy_s for t in self.transfers)

    @property
    def counts(self) -> dict[str, int]:
        """Collectives by kind."""
        return dict(Counter(t.kind for t in self.transfers))


@dataclass
class Result:
    """All that was measured of one variant, or why it could not be."""

    samples: list[Sample] = field(default_factory=list)
    memory: Memory | None = None
    compile_s: float = 0.0
    first_loss: float = float("nan")
    first_grads: dict[str, Tensor] = field(default_factory=dict)
    failure: str = ""
    trace: str = ""

    @property
    def ok(self) -> bool:
        """Whether there are numbers."""
        return not self.failure and bool(self.samples)

    def median(self, of: Callable[[Sample], float]) -> float:
        """Median over the rounds."""
        return statistics.median(map(of, self.samples))

    @property
    def step_s(self) -> float:
        """Median seconds of a forward and backward."""
        return self.median(lambda s: s.step_s)


def workload(row: Row, device: torch.device) -> Workload:
    """The mesh, the weights and the batch that all variants share."""
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (row.world_size,), mesh_dim_names=("dp",))
    with device:
        weights = LlamaLoss(row.config()).state_dict()
    batch = torch.randint(row.vocab, (row.batch, row.seq_len + 1), device=device)
    return Workload(
        row, mesh, device, weights, batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    )


def on_the_wire(row: Row) -> Workload:
    """The workload of a row on the CPU, this process connected to a wire that is calibrated."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the variants share the code of the model
    wire.connect(row.world_size)
    load = workload(row, torch.device("cpu"))
    choose_link(row, *calibrate(Runner(load, say=lambda line: print(line, flush=True))))
    return load


class Runner:
    """Builds the variants and steps them; a variant that fails is out, the others go on."""

    def __init__(
        self, load: Workload, say: Say, builders: Builders = BUILDERS, turns: Turns = ONLY_ONE
    ) -> None:
        self.load, self._say, self._builders, self._turns = load, say, builders, turns
        self.variants: dict[str, Variant] = {}
        self.results: dict[str, Result] = {}

    def build(self, names: Sequence[str]) -> None:
        """Build each variant that is not there yet, and run its first step, which compiles it."""
        for name in names:
            if name not in self.results:
                self.results[name] = Result()
                with self._turns.shared():
                    self._guard(name, self._build)

    def _build(self, name: str) -> None:
        start = time.perf_counter()
        torch.manual_seed(0)
        self.variants[name] = variant = self._builders[name](self.load)
        loss = self._forward_backward(variant)
        result = self.results[name]
        result.compile_s = time.perf_counter() - start
        result.first_loss = loss
        result.first_grads = {
            fqn: _local(p.grad).clone() for fqn, p in variant.params.items() if p.grad is not None
        }
        self._say(f"{name}: built in {result.compile_s:.1f} s, loss {loss:.5f}")

    def _guard(self, name: str, action: Callable[[str], None]) -> None:
        try:
            action(name)
        except Exception as error:
            result = self.results[name]
            result.failure = _reason(error)
            result.trace = traceback.format_exc()
            self.variants.pop(name, None)
            self._say(f"{name}: FAILED: {result.failure}")

    def _forward_backward(self, variant: Variant) -> float:
        variant.optimizer.zero_grad(set_to_none=True)
        loss = variant.step(self.load.tokens, self.load.targets)
        loss.backward()
        return float(loss.detach())

    def sample(self, name: str, *, update: bool = True) -> Sample:
        """One timed step of a variant; its optimizer step is timed apart, or left out."""
        variant = self.variants[name]
        variant.optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        link.take()
        start = time.perf_counter()
        loss = variant.step(self.load.tokens, self.load.targets)
        loss.backward()
        self._synchronize()
        end = time.perf_counter()
        transfers = [t for t in link.take() if t.kind != "other"]
        if update:
            variant.optimizer.step()
            self._synchronize()
        return Sample(end - start, time.perf_counter() - end, float(loss.detach()), transfers)

    def _synchronize(self) -> None:
        if self.load.device.type == "cuda":
            torch.cuda.synchronize()

    def rounds(self, warmup: int, rounds: int) -> None:
        """Step all variants in turn; each round begins with another one."""
        with self._turns.alone():
            self._rounds(warmup, rounds)

    def _rounds(self, warmup: int, rounds: int) -> None:
        gc.collect()
        gc.disable()
        for index in range(-warmup, rounds):
            names = list(self.variants)
            first = index % len(names)
            for name in names[first:] + names[:first]:
                self._guard(name, lambda name, keep=index >= 0: self._round(name, keep))
            gc.collect()
            done = " ".join(f"{n} {s[-1].step_s:.3f}" for n, s in self._samples() if s)
            self._say(f"round {index + 1} of {rounds}: {done}" if index >= 0 else "warm-up round")
        gc.enable()

    def _samples(self) -> list[tuple[str, list[Sample]]]:
        return [(name, self.results[name].samples) for name in self.variants]

    def _round(self, name: str, keep: bool) -> None:
        sample = self.sample(name)
        if keep:
            self.results[name].samples.append(sample)

    def memory(self) -> None:
        """Watch the allocations of one more step of each variant."""
        with self._turns.alone():
            for name in list(self.variants):
                self._guard(name, self._memory)

    def _memory(self, name: str) -> None:
        variant = self.variants[name]
        variant.optimizer.zero_grad(set_to_none=True)

        def step() -> None:
            variant.step(self.load.tokens, self.load.targets).backward()

        self.results[name].memory = measure_memory(variant, step)
        link.take()


def calibrate(runner: Runner, steps: int = 12) -> tuple[float, int]:
    """Measure, on a wire that takes no time, what its bandwidth is to be chosen from.

    Returns:
        Seconds of the floor's forward and backward, the median of its faster half (what slows a
        step now will not be there later), and the bytes of all gathers and reduces of simplefsdp
        without bucketing.

    Raises:
        RuntimeError: one of the two variants failed.
    """
    wire.set_link(0.0, float("inf"))
    runner.build(["floor", "none"])
    for name in ("floor", "none"):
        if runner.results[name].failure:
            raise RuntimeError(
                f"{name}: the wire cannot be calibrated without it; it failed with\n"
                f"{runner.results[name].trace}"
            )
    nbytes = sum(t.nbytes for t in runner.sample("none", update=False).transfers)
    seconds = sorted(runner.sample("floor", update=False).step_s for _ in range(steps))
    return statistics.median(seconds[: steps // 2]), nbytes


def choose_link(row: Row, floor_s: float, nbytes: int) -> None:
    """Set the wire's latency, and its bandwidth as the row says."""
    given = row.bandwidth_gb_s
    bandwidth = given * 1e9 if given is not None else nbytes / (row.wire_ratio * floor_s)
    wire.set_link(row.latency_us / 1e6, bandwidth)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reason(error: BaseException) -> str:
    """The line that says it, without the hints that Dynamo puts around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "BackendCompilerFailed":
        return lines[1]  # after "backend=... raised:"
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
