"""Peak memory of one step: what the step allocates, and what is held around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from variants import Variant

from simplefsdp.frontend.placement import local_nbytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one forward and backward, and of what this process, one rank, holds.

    Attributes:
        step_peak: most that was alive at once of what the step allocated: activations, full
            parameters and gradients in flight, and the gradients that stay.
        params: parameters (shards).
        grads: gradients (shards) after the step; part of ``step_peak`` as far as they are alive.
        optimizer: state of AdamW.
        extra: other buffers held through the run (DDP's buckets).
    """

    step_peak: int
    params: int
    grads: int
    optimizer: int
    extra: int

    @property
    def total_peak(self) -> int:
        """What the rank needs: everything it holds, and the peak of the step on top."""
        return self.params + self.optimizer + self.extra + self.step_peak


def measure(variant: Variant, step: Callable[[], None]) -> Memory:
    """Run ``step`` (forward and backward, from no gradients) once and watch its allocations."""
    params = list(variant.params.values())
    peak = allocated_peak(step, params[0].device)
    state = (v for s in variant.optimizer.state.values() for v in s.values())
    return Memory(
        step_peak=peak,
        params=local_nbytes(params),
        grads=local_nbytes(p.grad for p in params),
        optimizer=local_nbytes(state),
        extra=variant.extra_nbytes,
    )


def allocated_peak(step: Callable[[], None], device: torch.device) -> int:
    """Most bytes that were alive at once of what ``step`` allocates."""
    return _cuda_peak(step) if device.type == "cuda" else _cpu_peak(step)


def _cuda_peak(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(step: Callable[[], None]) -> int:
    """Peak of the running sum of the allocator's events, as the profiler records them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak
