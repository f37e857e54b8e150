"""A sweep as one HTML page that needs nothing from anywhere: maps of its cells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplefsdp.inspection.page import filled

_ASSETS = Path(__file__).parent / "assets"
_OWN = [
    _ASSETS / name
    for name in ("sweep.html", "sweep.css", "sweep_cells.js", "sweep_map.js", "sweep.js")
]
_HINT = "a cell tells why: point at it, tap it, or use the arrow keys"


def sweep_page(document: Mapping[str, Any]) -> str:
    """The page of a sweep's document, all of which is in it."""
    title = f"{document['name']} on {document['cluster']}: what fits, and how fast"
    return filled(_OWN, title, _HINT, document)
