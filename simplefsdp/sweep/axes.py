"""Parses the axes of a sweep, such as ``batch=1..16 seq=2k..128k ranks=8,64,512``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from simplefsdp.sweep.cells import Cell

NAMES = Cell._fields
LEAST = {"seq": 2}  # torch takes a size of 1 for a constant
MOST_CELLS = 100_000
MOST = 1 << 30  # the largest size, so that the bytes of a tensor still fit into 64 bits
_NUMBER = re.compile(r"(\d{1,18})(k?)")


def parse_axes(written: Sequence[str], default: Cell) -> dict[str, tuple[int, ...]]:
    """The values of each axis, ascending; an axis that is not written has the value of ``default``.

    ``a..b`` doubles from a up to at most b, ``a..b:c`` counts by c, and commas separate values;
    ``k`` stands for 1,024.

    Raises:
        ValueError: an axis is unknown, given twice or not written like this, or there are too many
            cells.
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in written:
        name, is_axis, values = text.partition("=")
        if not is_axis or name not in NAMES:
            raise ValueError(
                f"--sweep {text}: expected {', '.join(f'{name}=...' for name in NAMES)}, as in "
                "batch=1..16 seq=2k..128k ranks=8,64,512"
            )
        if name in found:
            raise ValueError(f"--sweep {text}: {name} is given twice")
        found[name] = _values(text, values, LEAST.get(name, 1))
    axes = {name: found.get(name, (size,)) for name, size in default._asdict().items()}
    _check_count(" ".join(written), math.prod(map(len, axes.values())))
    return axes


def cells_of(axes: dict[str, tuple[int, ...]]) -> list[Cell]:
    return [Cell(*sizes) for sizes in itertools.product(*(axes[name] for name in NAMES))]


def _values(text: str, values: str, least: int) -> tuple[int, ...]:
    found: set[int] = set()
    for part in values.split(","):
        span, counts, step = part.partition(":")
        first, is_span, last = span.partition("..")
        if not is_span:
            if counts:
                raise ValueError(f"--sweep {text}: {part} counts by {step}, from where to where?")
            found.add(_number(text, first, least))
            continue
        begin, end = _number(text, first, least), _number(text, last, least)
        if end < begin:
            raise ValueError(f"--sweep {text}: {end} is less than {begin}")
        by = _number(text, step, 1) if counts else 0
        _check_count(text, (end - begin) // by + 1 if by else 0)
        doubled = (begin << i for i in range((end // begin).bit_length()))
        found.update(range(begin, end + 1, by) if by else doubled)
    if max(found) > MOST:
        raise ValueError(f"--sweep {text}: expected at most {MOST:,}, got {max(found):,}")
    return tuple(sorted(found))


def _check_count(text: str, cells: int) -> None:
    if cells > MOST_CELLS:
        raise ValueError(
            f"--sweep {text}: that is {cells:,} cells, and a sweep has at most {MOST_CELLS:,}; "
            "take fewer values, or a larger step"
        )


def _number(text: str, written: str, least: int) -> int:
    matched = _NUMBER.fullmatch(written.strip())
    value = int(matched[1]) * (1024 if matched[2] else 1) if matched else 0
    if value < least:
        raise ValueError(
            f"--sweep {text}: expected a whole number of at least {least}, such as 8 or 4k, got "
            f"{written!r}"
        )
    return value
