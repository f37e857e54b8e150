"""What tells our passes apart in Inductor's cache: their sources and settings."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import inductor_passes
from inductor_passes.rehearsal import Settings


def identity(settings: Settings | None) -> str:
    """The passes' identity for Inductor's cache: a hash of all sources and of ``settings``."""
    return hashlib.sha256(f"{sources()}{settings!r}".encode()).hexdigest()


@functools.cache
def sources() -> str:
    """A hash of the sources of all of ``simplefsdp`` and of the passes."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in source_files())).hexdigest()


def source_files() -> list[Path]:
    """The source files that code in a cache may depend on."""
    packages = [Path(__file__).parents[1], Path(inductor_passes.__file__).parent]
    return sorted(file for path in packages for file in path.rglob("*.py"))
