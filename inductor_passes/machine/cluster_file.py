"""Clusters written to and read from JSON files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

from inductor_passes.ir.json_file import MIB, read_json, shown, typed, write_json
from inductor_passes.machine.cluster import Cluster, Peak, Wire
from inductor_passes.machine.links import Link
from inductor_passes.machine.presets import preset

FORMAT = "simplefsdp cluster"
VERSION = 1
_MAX_POINTS = 1000
_MAX_TEXT = 1000

T = TypeVar("T")


def as_cluster(value: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster: itself, a preset by name, or from a JSON file by path.

    A string that ends in ``.json`` or contains a path separator is a path.

    Raises:
        TypeError: it is none of these.
        ValueError: no such preset, or the file is not usable.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, str):
        is_path = value.endswith(".json") or os.sep in value
        return load(value) if is_path else preset(value)
    if isinstance(value, os.PathLike):
        return load(value)
    raise TypeError(
        "cluster: expected a preset's name, the path of a JSON file, or a Cluster, got "
        f"{type(value).__name__}"
    )


def as_json(cluster: Cluster) -> dict[str, Any]:
    """The content of a file of ``cluster``."""
    return {"format": FORMAT, "version": VERSION, **asdict(cluster)}


def save(path: str | os.PathLike[str], cluster: Cluster) -> None:
    """Write the file, complete or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_json(path, as_json(cluster))


def load(path: str | os.PathLike[str]) -> Cluster:
    """Read a file that :func:`save` wrote.

    Raises:
        ValueError: it cannot be read, is no cluster, or has a missing, unknown, negative, zero
            or NaN figure; names the file and the figure.
    """
    try:
        return _cluster(read_json(path, MIB))
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ValueError(
        f"cluster file {os.fspath(path)}: {reason} (write one with `simplefsdp calibrate`)"
    )


def _cluster(data: Any) -> Cluster:
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f'not a cluster file: it lacks "format": "{FORMAT}"')
    version = data.pop("version", None)
    if version != VERSION:
        raise ValueError(f"expected version {VERSION}, got {shown(version)}: calibrate again")

    def peaks(value: Any) -> dict[str, Peak]:
        found = typed(value, dict, "peaks").items()
        return {k: _build(Peak, v, f"peaks.{_text('dtype', k)}", _RAMPS) for k, v in found}

    def wires(value: Any) -> tuple[Wire, ...]:
        found = enumerate(typed(value, list, "wires"))
        return tuple(_build(Wire, v, f"wires[{i}]", {"link": link(i)}) for i, v in found)

    def link(i: int) -> Callable[[Any], Link]:
        return lambda value: _build(Link, value, f"wires[{i}].link", _RAMPS)

    texts = {name: functools.partial(_text, name) for name in ("name", "source")}
    return _build(Cluster, data, "", {"peaks": peaks, "wires": wires, **texts})


def _build(cls: type[T], data: Any, where: str, convert: Mapping[str, Callable[[Any], Any]]) -> T:
    """An instance of a dataclass; names ``where`` it is if a field is missing or wrong."""
    at = f"{where}: " if where else ""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    given = typed(data, dict, where)
    missing = [name for name, f in known.items() if f.default is MISSING and name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"unknown key {shown(unknown[0])}"
        raise ValueError(f"{at}{what}")
    try:
        return cls(**{k: convert[k](v) if k in convert else v for k, v in given.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{at}{error}") from error


def _ramp(name: str, value: Any) -> tuple[Any, ...]:
    points = typed(value, list, name)
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{name}: expected at most {_MAX_POINTS} points, got {len(points)}")
    return tuple(tuple(p) if isinstance(p, list) else p for p in points)


def _text(name: str, value: Any) -> str:
    if len(typed(value, str, name)) > _MAX_TEXT:
        raise ValueError(f"{name}: expected at most {_MAX_TEXT} characters, got {len(value)}")
    return str(value)


_RAMPS = {name: functools.partial(_ramp, name) for name in ("ramp", "matmul", "attention")}
