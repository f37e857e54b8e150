"""Reads a file of trace-event JSON, compressed or not, and says what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.ir.json_file import MIB, read_json, shown

_MAX_NBYTES = 4096 * MIB
_LATEST_US = 1e18  # thousands of years
_PLAIN = (str, int, float, bool, type(None))
_ARGS: dict[str, Any] = {
    "device": _PLAIN,
    "correlation": _PLAIN,
    "Input Dims": list,
    "Input type": list,
    "bytes": int,
}


class Event(NamedTuple):
    """An event with a duration. ``category`` and ``thread`` are plain values, which can be
    compared; a value of another type in the file is None here."""

    name: str
    category: Any
    thread: tuple[Any, Any]  # process and thread
    begin_us: float  # in the trace's clock
    end_us: float
    args: dict[str, Any]

    @property
    def span(self) -> tuple[float, float]:
        return self.begin_us, self.end_us


class Trace(NamedTuple):
    """The content of a trace file."""

    events: list[Event]
    processes: dict[Any, str]  # names by process id
    rank: int | None


def read_trace(path: Path) -> Trace:
    """Read the trace in a file.

    Raises:
        ValueError: the file is no (complete) JSON, no trace, too large, or has an event without a
            valid time; the message says what to do.
        OSError: the file cannot be read.
    """
    try:
        trace = read_json(path, _MAX_NBYTES)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; was the program stopped while it exported the trace? Export it again"
        ) from error
    found = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(found, list):
        keys = f"keys {', '.join(sorted(trace)[:5]):.200}" if isinstance(trace, dict) else None
        raise ValueError(
            f"{path}: expected the trace-event JSON of torch.profiler's export_chrome_trace, an "
            f'object with "traceEvents"; got {keys or shown(trace)}'
        )
    found = [e for e in found if isinstance(e, dict)]
    try:
        events = [_event(e) for e in found if e.get("ph") == "X" and "dur" in e]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = [e for e in found if e.get("name") == "process_name"]
    processes = {_plain(e.get("pid")): _text(_args(e).get("name")) for e in names}
    told = trace.get("distributedInfo") if isinstance(trace, dict) else None
    rank = told.get("rank") if isinstance(told, dict) else None
    return Trace(events, processes, rank if isinstance(rank, int) else None)


def _event(e: dict[str, Any]) -> Event:
    begin, us = _time(e, "ts"), max(0.0, _time(e, "dur"))
    thread = _plain(e.get("pid")), _plain(e.get("tid"))
    return Event(_text(e.get("name")), _plain(e.get("cat")), thread, begin, begin + us, _args(e))


def _text(value: object) -> str:
    """A text with "?" for each control character, so that it is safe to print on a terminal."""
    if not isinstance(value, str):
        return ""
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def _plain(value: object) -> Any:
    return value if isinstance(value, _PLAIN) else None


def _args(e: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an event, without those of wrong types. They are removed in place, as there
    may be millions of events."""
    args = e.get("args")
    if not isinstance(args, dict):
        return {}
    for key, types in _ARGS.items():
        if not isinstance(args.get(key), types):
            args.pop(key, None)
    return args


def _time(e: dict[str, Any], key: str) -> float:
    value = e.get(key)
    try:
        time = float(value) if isinstance(value, (int, float, str)) else math.nan
    except ValueError:
        time = math.nan
    if not abs(time) < _LATEST_US:  # nor NaN
        raise ValueError(
            f"the event {shown(_text(e.get('name')))}: {key}: expected a time in us, got "
            f"{shown(value)}"
        )
    return time
