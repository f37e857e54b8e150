"""What went over the modelled wire: each transfer, what it costs, and waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

_SPIN_S = 2e-4  # sleep() is late by up to this much; the rest is spun away


@dataclass
class Transfer:
    """One collective as the wire saw it; times are ``time.perf_counter`` seconds.

    Attributes:
        kind: ``gather``, ``reduce`` (reduce-scatter), ``all_reduce`` or ``other``.
        nbytes: bytes of the full tensors.
        group: name of the process group, which is the lane.
        issued_s: when it was issued.
        modelled_s: what the wire takes for it, queueing left out.
        done_s: when the wire is done with it, queueing included.
        copy_s: what the copies took that a NIC would make, beside everything else.
        slept_s: what its waiter slept: the exposed time.
        by_future: it was waited for through a future, where sleeping cannot be seen.
        events: CUDA only: (before, after) the wait, on the waiting stream.
    """

    kind: str
    nbytes: int
    group: str
    issued_s: float
    modelled_s: float
    done_s: float
    copy_s: float = 0.0
    slept_s: float = 0.0
    by_future: bool = False
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None


@dataclass
class Link:
    """What all lanes share: the cost of a transfer, and the record of transfers.

    Attributes:
        latency_s: of a transfer.
        bandwidth: bytes per second.
        blocks: of the GPU, that a transfer holds, as NCCL's channels do.
        sends: if not, a transfer is done as it is issued: outputs stay as they are.
        transfers: since they were last taken.
    """

    latency_s: float = 0.0
    bandwidth: float = float("inf")
    blocks: int = 1
    sends: bool = True
    transfers: list[Transfer] = field(default_factory=list)

    def seconds(self, kind: str, nbytes: int) -> float:
        """What the wire takes to move ``nbytes``."""
        once = self.latency_s + nbytes / self.bandwidth
        return 2 * once if kind == "all_reduce" else once

    def take(self) -> list[Transfer]:
        """The transfers recorded since the last call."""
        taken, self.transfers = self.transfers, []
        return taken


link = Link()


def told_to_profiler(transfer: Transfer, queued_s: float) -> AbstractContextManager[object]:
    """Around the issue: tell torch.profiler, if it runs, of a transfer that takes no thread.

    The name of the event has all that ``simplefsdp inspect`` needs to put the transfer into the
    profiler's own clock; :mod:`simplefsdp.inspection.profile` reads it.
    """
    if not profiler._is_profiler_enabled or transfer.modelled_s == 0:
        return nullcontext()
    return profiler.record_function(
        f"wire:{transfer.kind} nbytes={transfer.nbytes} begins_after_us={queued_s * 1e6:.3f} "
        f"takes_us={transfer.modelled_s * 1e6:.3f}"
    )


def exposed_s(transfers: Sequence[Transfer]) -> float:
    """Seconds that waiters stood still.

    A future's waiter is C++ code that cannot be watched. DDP, the one who uses futures, waits for
    all of them right after it issued the last, so what it waits for is the end of the last one.
    """
    for transfer in transfers:
        if transfer.events is not None:
            before, after = transfer.events
            after.synchronize()
            transfer.slept_s = before.elapsed_time(after) / 1e3
    slept = sum(t.slept_s for t in transfers if not t.by_future)
    futures = [t for t in transfers if t.by_future]
    if futures:
        slept += max(0.0, max(t.done_s for t in futures) - max(t.issued_s for t in futures))
    return slept


class Unsent(dist.Work):
    """The handle of a transfer on a link that does not send: it is done."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class WireWork(dist.Work):
    """The handle of one transfer, with what its copies are done by."""

    def __init__(
        self,
        transfer: Transfer,
        inputs: object,
        outputs: object,
        done: torch.cuda.Event | Future[None],
    ) -> None:
        super().__init__()
        self._transfer, self._done = transfer, done
        # A real transfer reads its inputs until it is done: they are memory in use until the wait.
        self._inputs, self._outputs = inputs, outputs
        self._held_up: set[torch.cuda.Stream] = set()

    def is_completed(self) -> bool:
        if not isinstance(self._done, Future):
            return bool(self._done.query())
        return time.perf_counter() >= self._transfer.done_s and self._done.done()

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep (CPU) or hold up the current stream (CUDA) until the transfer is done."""
        if not isinstance(self._done, Future):
            self._hold_up_stream(self._done)
        else:
            telling = profiler._is_profiler_enabled
            with profiler.record_function("wire:wait") if telling else nullcontext():
                begin = time.perf_counter()
                self._done.result()
                _sleep_until(self._transfer.done_s)
                self._transfer.slept_s += time.perf_counter() - begin
        self._inputs = self._outputs = None
        return True

    def _hold_up_stream(self, done: torch.cuda.Event) -> None:
        """Of what the stream is given from now on; each member of a bucket asks for it."""
        stream = torch.cuda.current_stream()
        if stream in self._held_up:
            return
        self._held_up.add(stream)
        if torch.cuda.is_current_stream_capturing():  # such events have no time
            stream.wait_event(done)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(done)
        after.record(stream)
        if self._transfer.events is None:
            self._transfer.events = (before, after)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that a thread completes in time: asleep till then, it takes nothing."""
        if not isinstance(self._done, Future):
            future = torch.futures.Future(devices=[torch.cuda.current_device()])
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(self._done)
                future.set_result(self._outputs)
            return future
        future = torch.futures.Future()
        self._transfer.by_future = True
        held = (self._inputs, self._outputs, self._done)

        def complete() -> None:
            held[2].result()
            _sleep_until(self._transfer.done_s, spin=False)
            future.set_result(held[1])

        threading.Thread(target=complete, daemon=True).start()
        return future


def _sleep_until(moment_s: float, *, spin: bool = True) -> None:
    start = time.perf_counter()
    if start >= moment_s:
        return
    time.sleep(max(0.0, moment_s - start - (_SPIN_S if spin else 0.0)))
    while time.perf_counter() < moment_s:
        pass
