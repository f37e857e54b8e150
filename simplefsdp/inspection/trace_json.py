"""A file of trace-event JSON, compressed or not, and what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from inductor_passes.ir.json_file import MIB, read_json, shown

_MAX_NBYTES = 4096 * MIB
_LATEST_US = 1e18  # thousands of years
_PLAIN = (str, int, float, bool, type(None))


def load_trace(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ValueError: it is no (whole) JSON, or without bounds; says what to do.
        OSError: it cannot be read.
    """
    try:
        return read_json(path, _MAX_NBYTES)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; was the program stopped while it exported the trace? Export it again"
        ) from error


def events_of(found: list[Any]) -> list[dict[str, Any]]:
    """The events of a trace. What they are told apart by can be compared, and their name is a text.

    Changes them, as there may be millions. What is of a wrong type is left out.
    """
    events = [e for e in found if isinstance(e, dict)]
    for e in events:
        name = e.get("name")
        if not isinstance(name, str):
            e["name"] = ""
        elif not name.isprintable():  # it could write to the terminal what it likes
            e["name"] = "".join(c if c.isprintable() else "?" for c in name)
        for key in ("pid", "tid", "cat"):
            if not isinstance(e.get(key), _PLAIN):
                del e[key]
        args = e.get("args")
        if isinstance(args, dict):
            _keep_plain(args)
    return events


def spans_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``events`` that last; ``ts`` and ``dur`` are finite numbers then.

    Raises:
        ValueError: of one they are not; says which.
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    for e in spans:
        for key in ("ts", "dur"):
            e[key] = _time(e, key)
        e["dur"] = max(0.0, e["dur"])
    return spans


def _keep_plain(args: dict[str, Any]) -> None:
    for key in ("device", "correlation"):
        if not isinstance(args.get(key), _PLAIN):
            del args[key]
    for key in ("Input Dims", "Input type"):
        if not isinstance(args.get(key, []), list):
            del args[key]
    if not isinstance(args.get("bytes"), (int, type(None))):
        del args["bytes"]


def _time(event: dict[str, Any], key: str) -> float:
    value = event.get(key)
    try:
        time = float(value) if isinstance(value, (int, float, str)) else math.nan
    except ValueError:
        time = math.nan
    if not abs(time) < _LATEST_US:  # nor NaN
        raise ValueError(
            f"the event {shown(event['name'])}: {key}: expected a time in us, got {shown(value)}"
        )
    return time
