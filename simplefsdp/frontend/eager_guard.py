"""Eager ranks that gather different parameters are told, by name, at the end of the forward.

Compiled ranks compare their graphs before they run one. Eager ones have none: each notes what a
forward gathers, and if it has not gathered just that before, compares it with the others when the
forward ends. One that took another branch has by then gathered something else than the others, or
waits in a gather that they have ended without: they wait for it no longer than the rank guard does.
A rank that changes over to a branch that all have taken before is told some forwards later
(``rank_sequence.py``).

Dynamo runs a function as it is that it has compiled too often, and it counts on each rank. So what
is gathered eagerly inside of a compiled call is compared before, or this rank would gather one by
one what the others gather in buckets.

What is not seen: a forward that others do not begin. It ends with the process group's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import rank_sequence
from simplefsdp._torch import place_called, recompile_limit, run_as_it_is
from simplefsdp.rank_guard import RankMismatchError, agree, ranks_of, ranks_of_model


class _Forward(threading.local):
    """The outermost eager forward of this thread, and what it has gathered so far, by mesh."""

    def __init__(self) -> None:
        self.depth = 0
        self.number = 0
        self.gathered: dict[DeviceMesh, list[str]] = {}
        self.sent: dict[str, list[str]] = {}  # by process group


_now = _Forward()
_numbers = count(1)  # of all threads
_patience_s = [0.0]  # the rank guard's, of what was compiled last; 0 if nothing was


def compiled_with(timeout_s: float) -> None:
    """Something is compiled, whose ranks wait so long for each other; 0 if they do not compare."""
    _patience_s[0] = timeout_s


def number_of_forward() -> int:
    """Which eager forward this is, of all that this process has begun; 0 outside of one."""
    return _now.number if _now.depth else 0


def note_gather(mesh: DeviceMesh, fqn: str, group: str) -> None:
    """A parameter that lies on ``mesh`` is about to be gathered, eagerly, by ranks of the process
    group with this name; "" if each rank has it whole."""
    if _now.depth:
        _now.gathered.setdefault(mesh, []).append(fqn)
        _now.sent.setdefault(group, []).append(fqn)
    elif group and _is_compiled_call():
        _agree_to_run_eagerly(f"the gather of {fqn}", ranks_of([mesh]))


def _is_compiled_call() -> bool:
    return _patience_s[0] > 0 and place_called() is not None


def _agree_to_run_eagerly(what: str, ranks: Sequence[int]) -> None:
    """Return when all ``ranks`` are about to do inside of a compiled call what is not compiled."""
    agree(
        f"{what} (eager, inside of a compiled call)",
        [f"{what} runs eagerly"],
        ranks,
        _patience_s[0],
        late=(
            "They run what they have compiled there, and gather otherwise: Dynamo runs a function "
            "as it is that it compiled more often than torch._dynamo.config.recompile_limit, "
            f"{recompile_limit()} here. Raise it on all ranks, before the first step; or let less "
            'differ between calls, TORCH_LOGS="recompiles" says what does: pad batches to a few '
            "lengths, pass tensors for numbers and strings"
        ),
    )


@contextmanager
def eager_forward(model: nn.Module) -> Iterator[None]:
    """One forward of a wrapped model."""
    if not _now.depth:
        if _is_compiled_call():
            _agree_to_run_eagerly(f"the forward of {type(model).__name__}", ranks_of_model(model))
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
