"""Eager ranks that gather different parameters are told, by name, at the end of the forward.

Compiled ranks compare their graphs before they run one. Eager ones have none: each notes what a
forward gathers, and if it has not gathered just that before, compares it with the others when the
forward ends. One that took another branch has by then gathered something else than the others, or
waits in a gather that they have ended without: they wait for it no longer than the rank guard does.
A rank that changes over to a branch that all have taken before is told some forwards later
(``rank_sequence.py``).

What is not seen: a forward that others do not begin. It ends with the process group's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import rank_sequence
from simplefsdp._torch import run_as_it_is
from simplefsdp.rank_guard import RankMismatchError, agree, ranks_of


class _Forward(threading.local):
    """The outermost eager forward of this thread, and what it has gathered so far, by mesh."""

    def __init__(self) -> None:
        self.depth = 0
        self.number = 0
        self.gathered: dict[DeviceMesh, list[str]] = {}
        self.sent: dict[str, list[str]] = {}  # by process group


_now = _Forward()
_numbers = count(1)  # of all threads


def number_of_forward() -> int:
    """Which eager forward this is, of all that this process has begun; 0 outside of one."""
    return _now.number if _now.depth else 0


def note_gather(mesh: DeviceMesh, fqn: str, group: str) -> None:
    """A parameter that lies on ``mesh`` is about to be gathered, eagerly, by ranks of the process
    group with this name; "" if each rank has it whole."""
    if _now.depth:
        _now.gathered.setdefault(mesh, []).append(fqn)
        _now.sent.setdefault(group, []).append(fqn)


@contextmanager
def eager_forward() -> Iterator[None]:
    """One forward of a wrapped model."""
    if not _now.depth:
        _now.number, _now.gathered, _now.sent = next(_numbers), {}, {}
    _now.depth += 1
    try:
        yield
    except BaseException:
        _now.depth -= 1
        with suppress(RankMismatchError):
            _note_sent()  # others may not fail
        raise
    _now.depth -= 1
    if not _now.depth:
        for mesh, fqns in _now.gathered.items():
            agree("what a forward gathers eagerly", ["eager", *fqns], ranks_of([mesh]))
    _note_sent()


def _note_sent() -> None:
    for group, fqns in _now.sent.items() if not _now.depth else ():
        rank_sequence.note(group, rank_sequence.gathered(fqns))


run_as_it_is(eager_forward.__wrapped__)  # type: ignore[attr-defined]
