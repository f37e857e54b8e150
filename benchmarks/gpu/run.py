"""Everything that is to be known of simplefsdp on a GPU, by one command. See README.md here.

    python benchmarks/gpu/run.py                   # all parts, half an hour
    python benchmarks/gpu/run.py --parts a b       # some of them, by letter or by name
    python benchmarks/gpu/run.py --side-by-side    # ten minutes, with 140 GB and 16 cores
    python benchmarks/gpu/run.py --smallest        # tiny shapes: a minute or two, on CPU, too

A part that is done in this environment is left out; one that was cut short goes on where it was,
and what failed is done again. The exit code is 1 if any part, or anything in one, failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.2  # between looks at what has ended
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"


@dataclass(frozen=True)
class Part:
    """A part: its letter, its name (of ``part_<name>.py`` and the results), its limit; and, side by
    side, in which turn it runs, with all others of that turn."""

    letter: str
    name: str
    limit_s: float
    turn: int = 0


PARTS = (
    Part("a", "machine", 150),
    Part("b", "correct", 440, turn=1),
    Part("c", "wire", 560, turn=1),
    Part("d", "predicted", 300, turn=2),
    Part("e", "host", 240, turn=2),
    Part("f", "step", 240, turn=2),
    Part("g", "kernels", 150, turn=2),
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for part in PARTS for name in (part.letter, part.name)]
    add = parser.add_argument
    letters = [part.letter for part in PARTS]
    add("--parts", nargs="+", choices=names, default=letters, metavar="PART", help=", ".join(names))
    add("--again", action="store_true", help="throw away what was found before, by other code, say")
    add("--smallest", action="store_true", help="tiny shapes, to see that it works")
    add("--side-by-side", action="store_true", help="build at the same time; time in turns")
    add("--device", choices=("cpu", "cuda"), help="default: CUDA if there is one")
    add("--out", type=_folder, default=RESULTS, help="folder of the results")
    add("--part-limit-s", type=float, help="seconds of each part, instead of its own")
    add("--limit-s", type=float, default=float("inf"), help="of all, where a call has a limit")
    return parser.parse_args(argv)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got nothing (is its variable set?)")
    return Path(text)


def environment_name(device: str, *, smallest: bool) -> str:
    """The folder of the results: which device, which torch."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    words = f"{name}-torch{torch.__version__}{'-smallest' if smallest else ''}"
    return re.sub(r"[^a-z0-9.-]+", "_", words.lower())


def main() -> int:
    """Run the parts, one after another or side by side; 1 if any did not come to its end, or has a
    failure."""
    import torch

    options = arguments()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no CUDA device here")
    if device == "cpu" and not options.smallest:
        sys.exit("there is no CUDA device here; --smallest runs on CPU, to see that the kit works")
    folder = options.out / environment_name(device, smallest=options.smallest)
    parts = [part for part in PARTS if {part.letter, part.name} & set(options.parts)]
    try:
        _make_ready(folder, parts if options.again else [])
    except OSError as error:
        sys.exit(f"--out {options.out}: {error.strerror}: {error.filename}; give another folder")
    how = ["--device", device, *(["--smallest"] if options.smallest else [])]
    stages: list[list[Part]] = [[part] for part in parts]
    if options.side_by_side:
        how += ["--side-by-side"]
        if not (folder / "machine.json").exists():  # which is not calibrated beside others
            parts = [part for part in PARTS if part.name == "machine" or part in parts]
        stages = [[part for part in parts if part.turn == turn] for turn in range(3)]
    end = time.monotonic() + options.limit_s
    all_done = True
    for stage in stages:
        left = end - time.monotonic()
        limits = {part: min(options.part_limit_s or part.limit_s, left) for part in stage}
        for part, done, line in run_stage(limits, folder, how):
            print(f"{part.letter} {part.name}: {line}", flush=True)
            all_done &= done
    print(f"results: {os.path.relpath(folder)}")
    return 0 if all_done else 1


def _make_ready(folder: Path, again: Sequence[Part]) -> None:
    """A folder that results can be written to, without those of the parts ``again``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").open("a").close()
    for part in again:
        (folder / f"{part.name}.json").unlink(missing_ok=True)


def run_stage(
    limits_s: Mapping[Part, float], folder: Path, how: list[str]
) -> Iterator[tuple[Part, bool, str]]:
    """Run parts at the same time, each in a process of its own and at most so long.

    Yields:
        Of each part, whether it is done and nothing failed, and its one line.
    """
    begin = time.monotonic()
    known = {part: _read(folder / f"{part.name}.json") for part in limits_s}
    with ExitStack() as stack:
        running = {
            part: stack.enter_context(_started(part, folder, how))
            for part, limit_s in limits_s.items()
            if not known[part].get("finished") and limit_s > 0
        }
        for part in (part for part in limits_s if part not in running):
            if known[part].get("finished"):
                yield part, not known[part].get("failed"), f"is there, {known[part]['line']}"
            else:
                yield part, False, "not begun: no time was left"
        while running:
            took_s = time.monotonic() - begin
            for part, process in list(running.items()):
                code = process.poll()
                if code is not None or took_s > limits_s[part]:
                    _stop(running.pop(part))
                    yield part, *_told(_read(folder / f"{part.name}.json"), code, took_s)
            time.sleep(_LOOK_S)


@contextmanager
def _started(part: Part, folder: Path, how: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a part; stopped at the end, with all that it started."""
    script, out = HERE / f"part_{part.name}.py", folder / f"{part.name}.json"
    with (folder / "log.txt").open("a") as log:
        print(f"\n--- {part.letter} {part.name} ---", file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, str(script), "--out", str(out), *how],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _told(found: dict, code: int | None, took_s: float) -> tuple[bool, str]:
    """Whether a part is done, and its line."""
    took = f"{took_s:.0f} s"
    if (code == 0 and found.get("line")) or found.get("finished"):  # it came to its end
        return not found.get("failed"), f"{found['line']} ({took})"
    ended = f"STOPPED at its limit, {took}"
    if code is not None:
        ended = f"FAILED with exit code {code} (log.txt says why)"
    return False, f"{ended}; {len(found.get('cells', {}))} cells are written; run again to go on"


def _environment() -> dict[str, str]:
    """So that the checkout is found without having been installed."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [HERE, HERE.parent, ROOT, ROOT / "tests"]  # the last for what parts share with tests
    path = [*map(str, folders), *filter(None, known), *_unpacked_wheels()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "KINETO_LOG_LEVEL": "5"}


def _unpacked_wheels() -> list[str]:
    """Of what travels with the checkout; what is installed comes before it on the path."""
    folder = HERE / "wheels"
    unpacked = folder / "unpacked"
    for wheel in folder.glob("*.whl"):
        if not (marker := unpacked / f".{wheel.name}").exists():
            zipfile.ZipFile(wheel).extractall(unpacked)
            marker.touch()
    return [str(unpacked)] if unpacked.exists() else []


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _leave(number: int, frame: object) -> None:
    """End as an error does, so that what was started ends, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; run again to go on")
