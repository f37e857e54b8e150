"""A file of trace-event JSON, compressed or not, and what is wrong with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def load_trace(path: Path) -> Any:
    """The JSON of a file.

    Raises:
        ValueError: it is no (whole) JSON; says what to do.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is cut short; export it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text, so no JSON: {error}") from error
    except json.JSONDecodeError as error:
        near_end = error.pos >= len(text) - 200
        what = "the JSON is cut short" if near_end else "this is no JSON"
        raise ValueError(
            f"{path}: {what}: {error.msg} at byte {error.pos:,} of {len(text):,}; was the program "
            "stopped while it exported the trace? Export it again"
        ) from error
