"""Real text as bytes: the corpus, and the batches each data-parallel rank trains on."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from simplefsdp.models.configs import DOCUMENT_SEPARATOR

_MAX_NBYTES = 64 * 2**20  # read in about a quarter of a second from a warm disk
PROMPT_NBYTES = 16  # bytes of held-out text that a sample continues
_VALIDATION_FRACTION = 0.05
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
# Tests of the standard library hold non-text and generated tables; third-party code differs from
# one machine to the next.
_SKIPPED_STDLIB_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


@dataclass(frozen=True)
class Corpus:
    """A byte-level corpus in memory; each document is followed by ``DOCUMENT_SEPARATOR``.

    ``train`` is uint8 ``[n]``; ``validation`` is uint8 ``[m]``, about a twentieth of all bytes.
    ``name`` is for people, and says how much was read; ``fingerprint`` is a hash of the bytes.
    """

    train: Tensor
    validation: Tensor
    name: str
    fingerprint: str


def load_corpus(path: Path | None = None, *, max_nbytes: int = _MAX_NBYTES) -> Corpus:
    """Read a corpus of at most ``max_nbytes`` bytes; nothing is decoded, so any encoding will do.

    A file is one document. In a folder, every regular file below it is a document, except
    byte-identical copies, hidden files, and files in folders that are hidden, ``__pycache__`` or
    ``node_modules``. None reads the `.py` sources of Python's standard library, without its tests.
    Documents are ordered by a hash of their relative path: a deterministic order, and a fair sample
    where ``max_nbytes`` or the validation split cuts the corpus. The split falls between two
    documents if one ends near enough.
    """
    files, source = _find_documents(path)
    buffer, ends, complete = _read_documents(files, max_nbytes)
    if len(buffer) < 2:
        found = f"{len(files)} files, {len(buffer)} bytes" if len(files) != 1 else "an empty file"
        raise ValueError(
            f"no text in {source}: found {found}; pass a text file, or a folder with text files "
            "(hidden ones are skipped)"
        )
    cut = _split_point(len(buffer), ends)
    bytes_ = torch.frombuffer(buffer, dtype=torch.uint8)
    return Corpus(
        train=bytes_[:cut],
        validation=bytes_[cut:],
        name=f"{source} ({'' if complete else 'first '}{len(buffer) / 2**20:.1f} MiB)",
        fingerprint=hashlib.sha256(buffer).hexdigest()[:16],
    )


def _find_documents(path: Path | None) -> tuple[list[Path], str]:
    """The files of a corpus in the order in which they are read, and a name for it."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = (f for f in _walk(root, _SKIPPED_STDLIB_FOLDERS) if f.suffix == ".py")
        return _in_hash_order(root, files), f"Python {platform.python_version()} library"
    if not path.exists():
        raise ValueError(
            f"data path {path} does not exist (working directory {Path.cwd()}): pass an existing "
            "file or folder, or leave it out to train on the Python standard library"
        )
    if path.is_dir():
        return _in_hash_order(path, _walk(path, _SKIPPED_FOLDERS)), str(path)
    if not path.is_file():
        raise ValueError(f"data path {path} is neither a file nor a folder: pass one of these")
    return [path], str(path)


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_refuse_unreadable):
        subfolders[:] = [s for s in subfolders if s not in skipped and not s.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _refuse_unreadable(error: OSError) -> NoReturn:
    # Skipping it would train on another corpus than the user expects, or than other ranks read.
    raise ValueError(
        f"cannot read {error.filename}: {error.strerror}; make it readable or move it elsewhere"
    ) from error


def _in_hash_order(root: Path, files: Iterable[Path]) -> list[Path]:
    def key(file: Path) -> bytes:
        return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest()

    return sorted(files, key=key)


def _read_documents(files: list[Path], max_nbytes: int) -> tuple[bytearray, list[int], bool]:
    """All documents, each followed by a separator; where each ends; whether all were read."""
    buffer = bytearray()
    ends: list[int] = []
    seen: set[bytes] = set()
    for file in files:
        room = max_nbytes - len(buffer)
        if room <= 1:
            return buffer, ends, False
        try:
            with file.open("rb") as opened:
                document = opened.read(room - 1)
                cut_short = bool(opened.read(1))
        except OSError as error:
            _refuse_unreadable(error)
        digest = hashlib.sha256(document).digest()
        if document and digest not in seen:
            seen.add(digest)
            buffer += document
            buffer.append(DOCUMENT_SEPARATOR)
            ends.append(len(buffer))
        if cut_short:
            return buffer, ends, False
    return buffer, ends, True


def _split_point(nbytes: int, ends: list[int]) -> int:
    """Where validation begins: at the end of a document, if one ends near the wanted place."""
    held_out = max(1, round(nbytes * _VALIDATION_FRACTION))
    wanted = nbytes - held_out
    nearest = min(ends, key=lambda end: abs(end - wanted))
    return nearest if 2 * abs(nearest - wanted) <= held_out and nearest < nbytes else wanted


@dataclass(eq=False)
class ShardedBatches:
    """Batches of fixed-length sequences for one data-parallel rank; the iteration never ends.

    Iterating yields ``(inputs, targets)``, int64 ``[global_batch_size / world_size, seq_len]``
    each, from ``tokens``, uint8 ``[n]``; targets are the inputs shifted by one. Every epoch visits
    the sequences in a new order that depends only on the seed and the epoch. The last sequences of
    an epoch are skipped if they do not fill a global batch. The ranks' batches put together in rank
    order are the global batch, which is the same for any number of ranks that divide it. A resumed
    run checks by ``fingerprint`` that it reads the same corpus.
    """

    tokens: Tensor
    _: KW_ONLY
    seq_len: int
    global_batch_size: int
    rank: int
    world_size: int
    seed: int
    fingerprint: str

    def __post_init__(self) -> None:
        self._n_sequences = max(0, (self.tokens.numel() - 1) // self.seq_len)
        self.batches_per_epoch = self._n_sequences // self.global_batch_size
        if not self.batches_per_epoch:
            raise ValueError(
                f"a global batch of {self.global_batch_size} sequences of {self.seq_len} tokens "
                f"needs {self.global_batch_size * self.seq_len + 1:,} bytes of text, got "
                f"{self.tokens.numel():,}: use more data, a smaller batch or a shorter sequence"
            )
        self.epoch = 0
        self._cursor = 0  # sequences of this epoch already yielded, over all ranks
        self._order = self._epoch_order()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._cursor + self.global_batch_size > self._n_sequences:
            self.epoch, self._cursor = self.epoch + 1, 0
            self._order = self._epoch_order()
        own = self.global_batch_size // self.world_size
        first = self._cursor + self.rank * own
        starts = self._order[first : first + own, None] * self.seq_len
        self._cursor += self.global_batch_size
        window = self.tokens[starts + torch.arange(self.seq_len + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch: the same on every rank, ints and strings only."""
        return {"epoch": self.epoch, "cursor": self._cursor, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, on any number of ranks.

        Raises:
            ValueError: it comes from another corpus, sequence length or seed, or is damaged;
                nothing is changed then.
        """
        for name, ours in self._identity().items():
            if name not in state or state[name] != ours:
                raise ValueError(
                    f"cannot resume the data position: it was saved with {name} = "
                    f"{state.get(name, 'nothing')}, this run has {ours}; resume with the same "
                    "data, sequence length and seed, or start a new run"
                )
        epoch, cursor = state.get("epoch"), state.get("cursor")
        if (
            not (isinstance(epoch, int) and isinstance(cursor, int))
            or epoch < 0
            or not 0 <= cursor <= self._n_sequences
        ):
            raise ValueError(
                f"damaged data position: epoch {epoch!r}, cursor {cursor!r} of "
                f"{self._n_sequences} sequences; resume from another checkpoint"
            )
        self.epoch, self._cursor = epoch, cursor
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "seq_len": self.seq_len, "seed": self.seed}

    def _epoch_order(self) -> Tensor:
        # A hash, so that no seed's epoch 1 is another seed's epoch 0.
        digest = hashlib.sha256(f"{self.seed} {self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        return torch.randperm(self._n_sequences, generator=generator)
