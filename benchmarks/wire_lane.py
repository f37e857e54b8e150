"""A lane of the modelled wire on a GPU: transfers one after another, as long as the model says.

The copies that a NIC would make run on a stream of their own, beside a kernel that stays until the
transfer's time is up: a transfer takes the longer of both, not their sum. The clock is the
device's, from when the lane gets to the transfer.

Both streams have the priority that FSDP2's have, and NCCL's where this library makes the group:
blocks of theirs that wait go before those of compute. So it is for every variant: a transfer of the
compiled ones is not later than FSDP2's because compute was queued up before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PRIORITY = -1  # the lower, the sooner; compute has 0


class Kernels(NamedTuple):
    """What runs on the lane, by buffers that it is given.

    Attributes:
        stamp: notes when a transfer begins.
        hold: stays, in so many blocks, until so many nanoseconds after that.
    """

    stamp: Callable[[Tensor], object]
    hold: Callable[[Tensor, int, int], object]


def triton_kernels(device: torch.device) -> Kernels:
    """Those of ``wire_kernels``, which needs Triton."""
    import wire_kernels

    kept = torch.zeros(wire_kernels.HELD, device=device)

    def stamp(began: Tensor) -> None:
        wire_kernels.stamp[(1,)](began, num_warps=1)

    def hold(began: Tensor, takes_ns: int, blocks: int) -> None:
        held, warps = wire_kernels.HELD, wire_kernels.WARPS
        wire_kernels.hold[(blocks,)](began, takes_ns, kept, HELD=held, num_warps=warps)

    return Kernels(stamp, hold)


class Lane:
    """The transfers of one process group."""

    def __init__(self, device: torch.device, kernels: Kernels | None = None) -> None:
        self._kernels = kernels or triton_kernels(device)
        self._began: Any = torch.zeros(1, dtype=torch.int64, device=device)
        self._wire, self._copies = (torch.cuda.Stream(priority=PRIORITY) for _ in range(2))

    def transfer(self, copy: Callable[[], None], seconds: float, blocks: int) -> torch.cuda.Event:
        """Queue up a transfer that needs what the current stream has made; the event is its end.

        Its buffers live till their waits, by contract.
        """
        done = torch.cuda.Event()
        self._wire.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._wire):
            self._kernels.stamp(self._began)
            self._copies.wait_stream(self._wire)
            self._kernels.hold(self._began, int(seconds * 1e9), blocks)
        with torch.cuda.stream(self._copies):
            copy()
        self._wire.wait_stream(self._copies)
        done.record(self._wire)
        return done
