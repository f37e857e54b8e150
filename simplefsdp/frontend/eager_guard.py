"""Eager ranks that gather different parameters are told, by name, at the end of the forward.

Ranks with compiled code compare their graphs before they run one. Eager ranks have no graph: each
notes what a forward gathers, and compares that with the others when the forward ends, unless it has
compared the same before. A rank that took another branch has by then gathered something else than
the others; or it waits in a gather that they have ended without, and they wait for it no longer
than the rank guard does. A rank that changes over to a branch that all have taken before is told
some forwards later (``rank_sequence.py``).

Dynamo runs a function uncompiled once it has compiled it as often as it may; it counts on each rank
by itself. The user may also tell it to run all functions uncompiled, on one rank. What is gathered
in such a function is compared before it is sent, each time: this rank would gather one by one what
ranks that still run compiled code gather in buckets.

Not noticed is a forward that others do not begin. It ends with the process group's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import torch
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.adapters._torch import ranks_of_group
from simplefsdp import rank_sequence, stalls
from simplefsdp._torch import given_up_on, run_as_it_is, told_to_run_uncompiled
from simplefsdp.rank_guard import LATE, RankMismatchError, agree, ranks_of
from simplefsdp.rank_sequence import PlainLoad
from simplefsdp.stalls import Watched


class _Forward(threading.local):
    """The outermost eager forward of this thread, and what it has gathered so far, by mesh."""

    def __init__(self) -> None:
        self.depth = 0
        self.number = 0
        self.gathered: dict[DeviceMesh, list[str]] = {}
        self.sent: dict[str, list[str]] = {}  # by process group
        self.given_up = ""  # the function around it that Dynamo has given up on; "" if none
        self.asked: set[tuple[int, ...]] = set()  # ranks that were asked if they run uncompiled
        self.loaded: dict[str, list[PlainLoad]] = {}  # by process group
        self.watched: Watched | None = None


_now = _Forward()
_numbers = count(1)  # of all threads


def number_of_forward() -> int:
    """Which eager forward this is, of all that this process has begun; 0 outside of one."""
    return _now.number if _now.depth else 0


def note_gather(
    mesh: DeviceMesh, fqn: str, group: str, taken: Callable[[], Iterable[PlainLoad]] = tuple
) -> None:
    """Note that a parameter is about to be gathered, eagerly.

    Args:
        mesh: of the parameter.
        fqn: its name.
        group: the name of the process group that gathers; "" if each rank has the parameter whole.
        taken: gives what plain tensors it was given, see ``loaded.py``.
    """
    if _now.depth:
        if _now.watched is None:
            _now.watched = stalls.begin(ranks_of([mesh]), mesh.device_type)
        _now.gathered.setdefault(mesh, []).append(fqn)
        _now.sent.setdefault(group, []).append(fqn)
        _now.loaded.setdefault(group, []).extend(taken())
    if given_up := (_now.depth and _now.given_up) or given_up_on():
        why, is_all = _GIVEN_UP.format(given_up), bool(_now.given_up)
        _agree_to_run_uncompiled(given_up, why, is_all, mesh, fqn, group)
    elif told := told_to_run_uncompiled("simplefsdp"):
        _agree_to_run_uncompiled("what was compiled", _TOLD.format(told), True, mesh, fqn, group)


_GIVEN_UP = (
    "Dynamo has compiled {} as often as it may on this rank and runs it as it is now, and may not "
    "have on those: what they gather does not match. Let it compile more often, on all ranks "
    "(torch._dynamo.config.recompile_limit, recompile_limit= of torch.compile); or let less differ "
    "between calls, TORCH_LOGS=recompiles says what does: pad batches to a few lengths"
)
_TOLD = (
    "On this rank {}, so that what was compiled runs uncompiled, and may not on those: what they "
    "gather does not match. Set it on all ranks or on none"
)


def _agree_to_run_uncompiled(
    function: str, why: str, is_all: bool, mesh: DeviceMesh, fqn: str, group: str
) -> None:
    """Return when all ranks of this gather, and of the reduce of its gradient, are about to gather
    in a function that Dynamo runs uncompiled.

    They are asked once per forward if that holds for all compiled functions of a forward
    (``is_all``); else at each gather, since Dynamo may have given up on the function of one layer,
    and run code for another.
    """
    ranks = ranks_of([mesh])
    if not torch.is_grad_enabled():  # nothing is reduced, so ranks with copies are sent nothing
        ranks = tuple(rank for rank in ranks if rank in (ranks_of_group(group) or ()))
    if _now.depth and is_all:
        if ranks in _now.asked:
            return
        _now.asked.add(ranks)
    agree(
        f"what is gathered uncompiled, beginning with {fqn},",
        [f"{function}: {fqn} uncompiled"],
        ranks,
        remember=False,
        late=f"{why}. Else: {LATE}",
    )


@contextmanager
def eager_forward() -> Iterator[None]:
    """One forward of a wrapped model."""
    if not _now.depth:
        _now.given_up, _now.asked = given_up_on(), set()
        _now.number, _now.gathered, _now.sent, _now.loaded = next(_numbers), {}, {}, {}
    _now.depth += 1
    try:
        yield
    except BaseException:
        _now.depth -= 1
        _end_watch()
        with suppress(RankMismatchError):
            _note_sent()  # as on the other ranks, which may not fail
        raise
    _now.depth -= 1
    _end_watch()
    if not _now.depth:
        for mesh, fqns in _now.gathered.items():
            agree("what a forward gathers eagerly", ["eager", *fqns], ranks_of([mesh]))
    _note_sent()


def _end_watch() -> None:
    if not _now.depth:
        stalls.end(_now.watched)
        _now.watched = None


def _note_sent() -> None:
    for group, fqns in _now.sent.items() if not _now.depth else ():
        rank_sequence.note(group, rank_sequence.gathered(fqns, _now.loaded[group]))


run_as_it_is(eager_forward.__wrapped__)  # type: ignore[attr-defined]
