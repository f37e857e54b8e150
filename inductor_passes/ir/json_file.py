"""JSON that may come from anybody: read within bounds, or refused by a ValueError of one line.

Every JSON file that this program reads is read here; a file that a library is to read is read here
first. Python's reader has no bounds: a few compressed bytes can become gigabytes, deep nesting ends
in a RecursionError in whatever walks it, and a number of a thousand digits does not fit a float.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any, TypeVar

MIB = 2**20
_PIECE = MIB
_MAX_DEPTH = 64
_MAX_INT = 2**64
_GZIP = b"\x1f\x8b"
_MAX_SHOWN = 200

T = TypeVar("T")


def read_json(path: str | os.PathLike[str], max_nbytes: int) -> Any:
    """The JSON in a file, packed by gzip or not.

    Args:
        path: of the file.
        max_nbytes: how much text there may be, unpacked.

    Raises:
        ValueError: it is too large, cut short, no JSON, nested too deeply, has a huge number, or is
            no file but a pipe or a device, which might never end.
        OSError: it cannot be read.
    """
    return parse_json(_text(Path(path), max_nbytes))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a file, complete or not at all, even if others write it, too; anybody may read it.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def parse_json(text: str | bytes) -> Any:
    """The JSON of ``text``.

    Raises:
        ValueError: see :func:`read_json`.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"this is no text, so no JSON: {error}") from error
    except json.JSONDecodeError as error:
        near_end = error.pos >= len(text) - 200
        what = "the JSON is cut short" if near_end else "this is no JSON"
        raise ValueError(f"{what}: {error.msg} at byte {error.pos:,} of {len(text):,}") from error
    except RecursionError as error:
        raise ValueError(f"the JSON is nested deeper than {_MAX_DEPTH} levels") from error
    except ValueError as error:  # Python reads no number of more than 4,300 digits
        raise ValueError("the JSON has a number of thousands of digits") from error
    _check(value)
    return value


def typed(value: Any, cls: type[T], what: str) -> T:
    """``value``, which must be of the type; ``float`` takes integers, too.

    Raises:
        ValueError: it is not; says ``what`` was expected.
    """
    if cls is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not cls:
        raise ValueError(f"{what}: expected {_CALLED.get(cls, cls.__name__)}, got {shown(value)}")
    return value


_CALLED: dict[type, str] = {dict: "an object", list: "a list", str: "a string", float: "a number"}


def shown(value: Any) -> str:
    """A value in a message: never more than a few words."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _text(path: Path, max_nbytes: int) -> bytes:
    # Non-blocking, below: to open a pipe must not wait for a writer.
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("this is no regular file: copy what it gives into one")
        raw = file.read(min(found.st_size, max_nbytes) + 1)
    text = _unpacked(raw, max_nbytes) if raw[:2] == _GZIP else raw
    if len(text) > max_nbytes:
        raise ValueError(f"this is larger than the {max_nbytes // MIB:,} MiB that it may have")
    return text


def _unpacked(raw: bytes, max_nbytes: int) -> bytes:
    """``raw`` unpacked; stops at the first piece with which there are more than ``max_nbytes``."""
    pieces, nbytes = [], 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            while nbytes <= max_nbytes and (piece := file.read(_PIECE)):
                pieces.append(piece)
                nbytes += len(piece)
    except EOFError as error:
        raise ValueError("the compressed file is cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"the compressed file is damaged: {error}") from error
    return b"".join(pieces)


def _check(value: Any) -> None:
    """Check that nothing is nested too deeply, and that no integer is too large."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            for inner in item.values() if type(item) is dict else item:
                kind = type(inner)
                if kind is dict or kind is list:
                    below.append(inner)
                elif kind is int and not -_MAX_INT < inner < _MAX_INT:
                    raise ValueError(f"the JSON has a number beyond {_MAX_INT:,}")
        if not below:
            return
        level = below
    raise ValueError(f"the JSON is nested deeper than {_MAX_DEPTH} levels")
