"""Our files in the folder of Inductor's caches, and repair of that cache if files were cut short.

A compiler that is killed, or whose disk is full, leaves a truncated shared object or precompiled
header under the name of the complete one. The next process to find such a file loads it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

log = logging.getLogger("simplefsdp")
_DIGEST_NBYTES = 32  # of SHA-256, ahead of the content

# What the loader says of a truncated shared object, depending on how much is missing.
_SHORT = re.compile(
    r"ImportError: (?P<path>\S+\.so): (?P<what>file too short|invalid ELF header|"
    r"cannot read file data|ELF load command past end of file)"
)
# What g++ says of a truncated header, wherever it ends; the message begins with g++'s command.
_SHORT_HEADER = re.compile(
    r"CppCompileError: .* -include (?P<path>\S+/precompiled_headers/\S+\.h) .*"
    r"(?P<what>cannot read PCH file|while reading precompiled header)",
    re.DOTALL,
)


@contextmanager
def broken_files_removed() -> Iterator[None]:
    """Inside, if loading a truncated file from Inductor's cache fails, the file is removed, and a
    ValueError tells the user to start again."""
    try:
        yield
    except Exception as error:
        path, what = _cut_short(f"{type(error).__name__}: {error}")
        if path is None:
            raise
        path.unlink(missing_ok=True)  # another rank may have been here first
        raise ValueError(
            f"{path}, in the compiler's cache, was cut short ({what}): a process was "
            "killed while it compiled, or the disk was full. The file has been taken out: start "
            "again, and it is made anew"
        ) from error


def cache_folder(name: str) -> Path | None:
    """Our subfolder ``name`` of the folder of Inductor's caches; None if the user has turned caches
    off, or if that folder cannot be made."""
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    try:
        return Path(cache_dir()) / name
    except OSError:
        return None


def read_kept(folder: str, name: str) -> bytes | None:
    """The content of a file that :func:`keep` wrote; None if it cannot be read, or has changed."""
    place = cache_folder(folder)
    try:
        written = (place / name).read_bytes() if place is not None else None
    except OSError:
        return None
    if written is None:
        return None
    content = written[_DIGEST_NBYTES:]
    if written[:_DIGEST_NBYTES] != sha256(content).digest():
        log.debug("%s, in the compiler's cache, is damaged, and is made anew", name)
        return None
    CacheArtifactManager.record_artifact(_Kept.type(), f"{folder}/{name}", content)
    return content


def keep(folder: str, name: str, content: bytes) -> None:
    """Write a file into our subfolder ``folder`` atomically, and add it to what
    ``torch.compiler.save_cache_artifacts`` gives. Raises an OSError if it cannot be written."""
    from torch._inductor.codecache import write_atomic

    if (place := cache_folder(folder)) is not None:
        write_atomic(str(place / name), sha256(content).digest() + content, make_dirs=True)
        CacheArtifactManager.record_artifact(_Kept.type(), f"{folder}/{name}", content)


class _Kept(CacheArtifact):
    """A file of ours among what ``torch.compiler.save_cache_artifacts`` gives."""

    def populate_cache(self) -> None:
        folder, _, name = self.key.partition("/")
        if Path(folder).name == folder and Path(name).name == name:  # nowhere else
            keep(folder, name, self.content)

    @staticmethod
    def type() -> str:
        return "simplefsdp"


CacheArtifactFactory.register(_Kept)


def _cut_short(message: str) -> tuple[Path | None, str]:
    """The truncated file of the cache that an error message is about, or None; and its words."""
    if header := _SHORT_HEADER.search(message):
        return Path(header["path"] + ".gch"), header["what"]
    shared = _SHORT.search(message)
    if shared is None or not Path(shared["path"]).is_relative_to(cache_dir()):
        return None, ""
    return Path(shared["path"]), shared["what"]
