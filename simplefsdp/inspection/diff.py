"""What the passes merged and moved, one line per collective."""

from __future__ import annotations

from itertools import accumulate

from inductor_passes.ir.program import Program
from inductor_passes.ir.text import to_text
from simplefsdp.inspection.names import shorten_fqns
from simplefsdp.words import plural

Places = dict[str | tuple[str, str], tuple[int, int]]


def texts(before: Program, after: Program) -> str:
    """Both programs in full, in the language of :mod:`inductor_passes.ir.text`."""
    return f"# before the passes\n{to_text(before)}\n# after the passes\n{to_text(after)}"


def describe_changes(before: Program, after: Program) -> list[str]:
    """What happened to each collective of ``after``: how many were merged into it, and how far its
    start and wait moved, counted in compute ops. Unchanged collectives are left out."""
    was, computed = _places(before), _computed(after)
    lines = []
    for i, op in after.starts():
        c = after.sent[op.name]
        # Our merging keeps the buffers that the members fill; torch's makes new ones.
        members = [was[name] for name in op.writes if name in was]
        members = members or [was[c.kind, fqn] for fqn in c.fqns if (c.kind, fqn) in was]
        if not members:
            continue
        # Compare with the earliest start, and with the earliest wait, of all members.
        start, wait = map(min, zip(*members, strict=True))
        merged = f"{len(members)} {c.kind}s merged" if len(members) > 1 else ""
        moved = _moved("start", computed[i] - start)
        waited = _moved("wait", computed[min(after.waits_of[i])] - wait)
        if changes := "; ".join(filter(None, (merged, moved, waited))):
            lines.append(f"{c.kind} {shorten_fqns(c.fqns) or op.name}: {changes}")
    return lines


def _moved(what: str, places: int) -> str:
    way = "earlier" if places < 0 else "later"
    return f"{what} {plural(abs(places), 'compute op')} {way}" if places else ""


def _places(program: Program) -> Places:
    """Numbers of compute ops before the start and the wait of each collective, by each buffer that
    it fills, and by its kind and each parameter."""
    computed = _computed(program)
    found: Places = {}
    for i, op in program.starts():
        c = program.sent[op.name]
        names = [(c.kind, fqn) for fqn in c.fqns]
        place = computed[i], computed[min(program.waits_of[i])]
        found |= dict.fromkeys((*op.writes, *names), place)
    return found


def _computed(program: Program) -> list[int]:
    """Number of compute ops before each op."""
    return list(accumulate((op.kind == "compute" for op in program.ops), initial=0))
