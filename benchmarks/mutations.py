"""Files that were changed at random: each is read, or refused in one line.

Checkpoints, clusters, traces, safetensors folders and what a run leaves are written, changed (bits,
pieces, values in their structure) and read again, as the commands read them. Anything but a result
or a ValueError or OSError of one line is a finding, and so is code of a file that runs, a file that
takes long, and a checkpoint with checksums that loads although it was changed.

    python benchmarks/mutations.py --number 10000
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mutate import change_bytes
from mutated_files import TARGETS

SLOW_S = 10.0
MOST_CHARACTERS = 2000
_RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


@dataclass
class Found:
    """What became of the files.

    Attributes:
        refused: with a line that says why.
        read: as if nothing were wrong.
        bad: findings: which file, and what happened.
        slowest_s: time of the file that took longest.
    """

    refused: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def try_files(number: int, seed: int, say: Callable[[str], object] | None = None) -> Found:
    """Change and read ``number`` files, of each kind as many; the same ones for a seed."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder, _only_errors():
        _watch_for_code()
        samples = {name: _sample(Path(folder), name) for name in TARGETS}
        for i in range(number):
            name = list(TARGETS)[i % len(TARGETS)]
            _try(found, name, samples[name], random.Random(f"{seed} {i}"), f"{seed} {i}")
            found.bad += [f"{name} ({seed} {i}): ran {event}" for event in _ran]
            _ran.clear()
            if say is not None and (i + 1) % 1000 == 0:
                say(f"{i + 1} files, {len(found.bad)} findings")
    return found


@contextmanager
def _only_errors() -> Iterator[None]:
    """A changed file may well be warned of."""
    log = logging.getLogger("simplefsdp")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


def _sample(folder: Path, name: str) -> Path:
    inside = folder / name.replace(" ", "-")
    inside.mkdir()
    path = TARGETS[name].write(inside)
    before = path.read_bytes()
    TARGETS[name].read(path)  # it is good before it is changed
    path.write_bytes(before)
    return path


def _try(found: Found, name: str, sample: Path, rng: random.Random, which: str) -> None:
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(shutil.copytree(sample.parent, Path(scratch, "x"))) / sample.name
        before = path.read_bytes()
        data = rng.choice([change_bytes, target.structure])(rng, before)
        for _ in range(rng.choice([0, 0, 1, 2])):
            data = change_bytes(rng, data)
        path.write_bytes(data)
        begin = time.perf_counter()
        try:
            _reading.append(name)
            target.read(path)
            found.read[name] += 1
            if target.detects and data != before:
                found.bad.append(f"{name} ({which}): loaded although it was changed")
        except (ValueError, OSError) as error:
            found.refused[name] += 1
            if "\n" in str(error) or len(str(error)) > MOST_CHARACTERS:
                found.bad.append(f"{name} ({which}): not in one line: {str(error)[:300]!r}")
        except Exception:
            found.bad.append(f"{name} ({which}):\n{traceback.format_exc()}")
        finally:
            _reading.clear()
        took = time.perf_counter() - begin
        found.slowest_s = max(found.slowest_s, took)
        if took > SLOW_S:
            found.bad.append(f"{name} ({which}): took {took:.0f} s")


_ran: list[str] = []
_reading: list[str] = []


@functools.cache
def _watch_for_code() -> None:
    """Note what would run code while a file is read; a hook of Python's cannot be taken off."""

    def hook(event: str, args: tuple[object, ...]) -> None:
        if _reading and event in _RUNS_CODE:
            _ran.append(f"{event} {args!r:.100}")

    sys.addaudithook(hook)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    found = try_files(options.number, options.seed, print)
    for name in TARGETS:
        print(f"{name:17} refused {found.refused[name]:6,}  read {found.read[name]:6,}")
    for line in found.bad[:20]:
        print(line)
    print(
        f"{options.number:,} files, {len(found.bad)} findings, slowest {found.slowest_s:.2f} s, "
        f"{time.perf_counter() - begin:.0f} s in all"
    )
    return 1 if found.bad else 0


if __name__ == "__main__":
    sys.exit(main())
