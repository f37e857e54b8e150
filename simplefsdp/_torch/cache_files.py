"""Files of Inductor's cache that were not written to their end.

A compiler that is killed, or whose disk is full, leaves a shared object that is cut short, under
the name of the whole one. Whoever finds it there loads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What the loader says of it, by how much is missing.
_SHORT = re.compile(
    r"ImportError: (?P<path>\S+\.so): (?P<what>file too short|invalid ELF header|"
    r"cannot read file data|ELF load command past end of file)"
)


@contextmanager
def broken_files_removed() -> Iterator[None]:
    """Inside, what is loaded from Inductor's cache and is cut short is removed from it.

    Raises:
        ValueError: something was; it says to start again.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        yield
    except Exception as error:
        found = _SHORT.search(f"{type(error).__name__}: {error}")
        if found is None or not Path(found["path"]).is_relative_to(cache_dir()):
            raise
        path = Path(found["path"])
        path.unlink(missing_ok=True)  # another rank may have been here first
        raise ValueError(
            f"{path}, in the compiler's cache, was cut short ({found['what']}): a process was "
            "killed while it compiled, or the disk was full. The file has been taken out: start "
            "again, and it is made anew"
        ) from error
