"""What the keys of Inductor's caches tell of the machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

from torch import Tensor


@contextmanager
def triton_by_version(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, keys tell the version of Triton, not a hash of its files, if all inputs are on the
    CPU, where no code comes of it: that takes each process a second."""
    from torch._inductor import config
    from torch._inductor.codecache import CacheBase

    devices = {value.device.type for value in example_inputs if isinstance(value, Tensor)}
    if devices != {"cpu"} or config.cpu_backend == "triton":
        yield
        return
    # Its own answer, once given, stands for the process, which may yet compile for a GPU.
    with patch.object(CacheBase, "get_system", staticmethod(_system)):
        yield


@functools.cache
def _system() -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"version": {"triton": triton}, "hash": f"cpu, Triton {triton}"}
