"""What a modelled wire (``benchmarks/wire.py``) tells torch's profiler of its transfers.

It has no thread and no NCCL kernel to be known by. Where a transfer is launched it records an event
named ``wire:KIND nbytes=N begins_after_us=T takes_us=T``: KIND is ``gather``, ``reduce`` or
``all_reduce``, N the bytes of the full tensors.

On CPU the transfer's begin counts from that of the event, which covers the copies that a NIC would
make; ``wire:wait`` covers waiting, and neither is compute. On CUDA the event covers the launches of
the kernels and copies that the transfer consists of: it lasts as long as they do on the device.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_NAME = re.compile(
    r"^wire:(?P<kind>gather|reduce|all_reduce) nbytes=(?P<nbytes>\d{1,18}) "
    r"begins_after_us=(?P<after>\d{0,15}\.?\d{1,15}) takes_us=(?P<takes>\d{0,15}\.?\d{1,15})$"
)


class Told(NamedTuple):
    """A transfer, as its event tells of it.

    Attributes:
        kind: as of :class:`inductor_passes.ir.program.Collective`.
        nbytes: of the full tensors.
        after_us: when it begins, counted from the begin of the launch, on CPU.
        takes_us: what the model says, on CPU.
        thread: that launched it.
        launch: begin and end of the event, in the trace's clock.
    """

    kind: str
    nbytes: int
    after_us: float
    takes_us: float
    thread: tuple[object, object]
    launch: tuple[float, float]


def told_by(event: Mapping[str, Any]) -> Told | None:
    """The transfer that an event tells of; on a device there is a second event, which does not."""
    found = _NAME.match(str(event["name"]))
    if found is None or event.get("cat") == "gpu_user_annotation":
        return None
    begin = float(event["ts"])
    return Told(
        found["kind"],
        int(found["nbytes"]),
        float(found["after"]),
        float(found["takes"]),
        (event.get("pid"), event.get("tid")),
        (begin, begin + float(event["dur"])),
    )


def transfer_of_launches(
    spans: Sequence[Mapping[str, Any]], launched: Mapping[object, Mapping[str, Any]]
) -> dict[object, Told]:
    """The transfer that each launch of a kernel or copy is for, if it is for one.

    Args:
        spans: events of the trace.
        launched: calls of the CUDA runtime or driver, by what correlates them to the device's.
    """
    transfers = sorted(filter(None, map(told_by, spans)), key=lambda t: t.launch)
    begins = [t.launch[0] for t in transfers]
    found: dict[object, Told] = {}
    for key, call in launched.items():
        at = bisect_right(begins, float(call["ts"])) - 1
        if at < 0 or float(call["ts"]) > transfers[at].launch[1]:
            continue
        if transfers[at].thread == (call.get("pid"), call.get("tid")):
            found[key] = transfers[at]
    return found
