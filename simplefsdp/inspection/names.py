"""Names short enough for a table: parameters, modules, bytes and times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def shorten_fqns(fqns: Sequence[str]) -> str:
    """Parameters in a few words: ``layers.3.* (9)``, ``layers.{3..5}.* (27)``, ``norm.weight``."""
    if len(fqns) <= 1:
        return "".join(fqns)
    blocks = list(dict.fromkeys(block_of(fqn.rpartition(".")[0]) for fqn in fqns))
    if len(blocks) == 1 and blocks[0]:
        return f"{'.'.join(_shared([fqn.split('.') for fqn in fqns]))}.* ({len(fqns)})"
    if len(blocks) == 2 == len(fqns):
        return ", ".join(fqns)
    return f"{shorten_blocks(blocks)} ({len(fqns)})"


def _shared(paths: Sequence[Sequence[str]]) -> Sequence[str]:
    """The longest common prefix of all paths."""
    first = paths[0]
    n = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), None)
    return first[:n]


def shorten_blocks(blocks: Sequence[str]) -> str:
    """Modules in a few words: runs of numbered ones as ``layers.{3..5}``, others one by one."""
    parts: list[tuple[str, int, int]] = []
    for block in blocks:
        stem, dot, number = block.rpartition(".")
        stem += dot
        at = int(number) if number.isdecimal() else -1
        if at >= 0 and parts and parts[-1][0] == stem and abs(parts[-1][2] - at) == 1:
            parts[-1] = (stem, parts[-1][1], at)
        else:
            parts.append((stem, at, at) if at >= 0 else (block, -1, -1))
    named = [
        stem if first < 0 else f"{stem}{first}" if first == last else f"{stem}{{{first}..{last}}}"
        for stem, first, last in parts
    ]
    return ", ".join(named) if len(named) <= 3 else f"{named[0]}, {named[1]} .. {named[-1]}"


def block_of(module: str) -> str:
    """The block that a module is part of: its path up to the last number in it, else all of it."""
    numbered = re.match(r"^(?:.*\.)?\d+(?=\.|$)", module)
    return numbered[0] if numbered else module


def nbytes_text(nbytes: float) -> str:
    """Bytes with three digits, in decimal units: ``436 MB``."""
    return _three(nbytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def over_text(nbytes: float, room_nbytes: float) -> str:
    """Bytes that do not fit into ``room_nbytes``, and by how much they exceed it, which three
    digits alone may not show."""
    return f"{nbytes_text(nbytes)}, {nbytes_text(nbytes - room_nbytes)} over"


def time_text(us: float) -> str:
    """A time with three digits: ``1.21 ms``."""
    return _three(us, {"s": 1e6, "ms": 1e3, "us": 1})


def _three(value: float, units: Mapping[str, float]) -> str:
    """A value with three digits, in the first unit that is not larger than the value, or in the
    last. A number that ``g`` would write as ``1e+03`` gets all digits before the point."""
    unit = next((name for name, size in units.items() if abs(value) >= size), [*units][-1])
    number = value / units[unit]
    return (f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}") + f" {unit}"
