"""The events by which a modelled wire (``benchmarks/wire.py``) shows its transfers in a profile.

Such a wire has no thread and no NCCL kernel that could be recognised. Instead, where a transfer is
launched, it records an event named ``wire:KIND nbytes=N begins_after_us=T takes_us=T``: KIND is
``gather``, ``reduce`` or ``all_reduce``, and N the bytes of the full tensors.

On CPU, the event covers the copies that a NIC would make, and the transfer begins the given time
after the begin of the event. ``wire:wait`` covers waiting. Neither is compute. On CUDA, the event
covers the launches of the kernels and copies that the transfer consists of, and the transfer lasts
as long as these do on the device.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from simplefsdp.inspection.trace_json import Event

_NAME = re.compile(
    r"^wire:(?P<kind>gather|reduce|all_reduce) nbytes=(?P<nbytes>\d{1,18}) "
    r"begins_after_us=(?P<after>\d{0,15}\.?\d{1,15}) takes_us=(?P<takes>\d{0,15}\.?\d{1,15})$"
)


class Told(NamedTuple):
    """A transfer, as its event describes it."""

    kind: str
    nbytes: int
    after_us: float  # on CPU: when it begins, counted from the begin of the launch
    takes_us: float  # on CPU: its duration, by the model of the wire
    thread: tuple[Any, Any]  # the process and thread that launched it
    launch: tuple[float, float]  # begin and end of the event


def told_by(event: Event) -> Told | None:
    """The transfer that an event describes, or None. With a GPU there is a second event of the same
    name, on the device's side, which is ignored."""
    found = _NAME.match(event.name)
    if found is None or event.category == "gpu_user_annotation":
        return None
    after_us, takes_us = float(found["after"]), float(found["takes"])
    return Told(found["kind"], int(found["nbytes"]), after_us, takes_us, event.thread, event.span)


def transfer_of_launches(events: Iterable[Event], launched: Mapping[Any, Event]) -> dict[Any, Told]:
    """The transfer to which each launch of a kernel or copy belongs; launches that belong to none
    are left out. Launches are calls of the CUDA runtime or driver, keyed by the number that
    correlates them with events of the device."""
    transfers = sorted(filter(None, map(told_by, events)), key=lambda t: t.launch)
    begins = [t.launch[0] for t in transfers]
    found: dict[Any, Told] = {}
    for key, call in launched.items():
        at = bisect_right(begins, call.begin_us)
        last = transfers[at - 1] if at else None
        if last and call.begin_us <= last.launch[1] and last.thread == call.thread:
            found[key] = last
    return found
