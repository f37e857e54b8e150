"""One training step over real TCP: two network namespaces, a rate-limited link, a core each.

The variants of step.py, gloo between two ranks on one machine; and what was predicted of ours. The
ranks go through the variants in lockstep, round by round. Needs root, iproute2 (`ip`, `tc`) and
two cores; says what is missing and exits with 0 otherwise. The namespaces have one address each
and no way out. Examples:

    python benchmarks/two_hosts.py
    python benchmarks/two_hosts.py --rounds 3 --variants floor fsdp2_eager manual
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "two_hosts.json"
RANKS = (0, 1)
INTERFACE = "wire0"  # either end of the link, each in a namespace of its own
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PREFIX = "simplefsdp"  # of namespaces
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    layers: int = 6
    """Transformer layers."""
    dim: int = 512
    """Width; a multiple of 128."""
    vocab: int = 2048
    """Rows of the embedding and of the output matrix."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch: int = 4
    """Sequences per rank; by default the wire is busy for 0.5 to 1 of the time of compute."""
    rate_mbit: int = 1000
    """Rate of the link in 1e6 bits per second, in each direction."""
    variants: tuple[str, ...] = ()
    """Which variants to run, see variants.py. Default: those of step.py. `floor` always runs."""
    rounds: int = 11
    """Timed rounds; each steps every variant once."""
    warmup: int = 2
    """Rounds before those."""
    time_limit_s: float = 1800.0
    """All is ended after this long."""
    json: Path | None = None
    """Default: benchmarks/results/two_hosts.json if no option but this, --time-limit-s or a higher
    --rounds was given, nowhere otherwise."""


def parse(argv: Sequence[str]) -> Options:
    """The options, or an error that says which is wrong."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    if min(options.rounds, options.rate_mbit) < 1 or options.warmup < 0:
        sys.exit("--rounds and --rate-mbit: expected 1 or more; --warmup: 0 or more")
    if options.variants:
        from variants import BUILDERS

        if unknown := ", ".join(name for name in options.variants if name not in BUILDERS):
            sys.exit(f"--variants: expected some of {', '.join(BUILDERS)}, got {unknown}")
    return options


def missing() -> str | None:
    """What this machine lacks, in a line; None if nothing."""
    programs = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo"
    cores = len(os.sched_getaffinity(0))
    return f"it needs two cores, and may use {cores}" if cores < 2 else None


class NetworkRefusedError(RuntimeError):
    """This machine lets us make no namespaces, links or rate limits."""


def _ip(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkRefusedError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def network(rate_mbit: int) -> Iterator[list[str]]:
    """Two namespaces and the link between them, removed at the end; gives the namespaces' names."""
    _remove_orphans()
    names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in RANKS]
    try:
        _create(names, rate_mbit)
        yield names
    finally:
        for name in names:  # the link goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _create(names: Sequence[str], rate_mbit: int) -> None:
    for name in names:
        _ip("ip", "netns", "add", name)
    peer = f"type veth peer name {INTERFACE} netns {names[1]}"
    _ip(*f"ip link add {INTERFACE} netns {names[0]} {peer}".split())
    # 4 ms of the rate, more than a timer tick, and no less than what TCP hands over in one piece.
    burst = max(rate_mbit * 1_000_000 // 8 // 250, 1 << 17)
    limit = f"tbf rate {rate_mbit}mbit burst {burst} latency 50ms"
    for name, address in zip(names, ADDRESSES, strict=True):
        # No IPv6 address: gloo would take whichever comes first.
        for setting in (
            f"ip -n {name} address add {address}/30 dev {INTERFACE}",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set {INTERFACE} addrgenmode none up",
            f"tc -n {name} qdisc add dev {INTERFACE} root {limit}",
        ):
            _ip(*setting.split())


def _remove_orphans() -> None:
    """Remove the namespaces of runs that were killed the hard way."""
    for name, pid in re.findall(rf"({PREFIX}-(\d+)-[01])\b", _ip("ip", "netns", "list")):
        if not Path(f"/proc/{pid}").exists():
            _ip("ip", "netns", "delete", name)


def launch(options: Options, argv: Sequence[str], names: Sequence[str], folder: Path) -> None:
    """Run both ranks to their end, showing what rank 0 says.

    Raises:
        SystemExit: a rank failed, or the time is up.
    """
    ranks = []
    try:
        for rank, core in zip(RANKS, sorted(os.sched_getaffinity(0)), strict=False):
            ranks.append(_start(rank, core, names[rank], argv, folder))
        _watch(ranks, folder, time.monotonic() + options.time_limit_s)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C leaves the cleanup alone
        for process in ranks:
            _end(process)


def _start(rank: int, core: int, name: str, argv: Sequence[str], folder: Path) -> Process:
    here = (sys.executable, __file__, "--rank", str(rank), str(core), str(folder / "results.json"))
    command = ["ip", "netns", "exec", name, *here, *argv]
    # One compile thread: Inductor's workers would be further processes on this core.
    env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )


def _watch(ranks: Sequence[Process], folder: Path, deadline: float) -> None:
    with (folder / "rank0.log").open() as log:
        while True:
            codes = [process.poll() for process in ranks]
            print(log.read(), end="", flush=True)
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                _give_up(folder, failed, f"exit codes {codes} (None: still running)")
            if None not in codes:
                return
            if time.monotonic() > deadline:
                _give_up(folder, RANKS, "out of time; --time-limit-s gives it more")
            time.sleep(0.5)


def _give_up(folder: Path, ranks: Sequence[int], reason: str) -> None:
    for rank in ranks:
        lines = (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        print(f"--- rank {rank}, last lines", *lines[-25:], sep="\n", file=sys.stderr)
    sys.exit(f"two_hosts: {reason}")


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a C++ compiler, too
    process.communicate()


COLUMNS = {
    "step s": "forward and backward of the slower rank, median",
    **dict.fromkeys(("quartiles", "/floor"), ""),
    "eager/x": "FSDP2 eager / this",
    "comp/x": "FSDP2 compiled / this",
    "sent MB": "by the busier rank, per step",
    "wire s": "what the link takes for them",
    "optim s": "",
    "predicted s": "of the step, by a cluster that is calibrated on both ranks first (error)",
    "MiB": "that a step allocates at most, predicted / measured",
}


def print_report(data: dict[str, Any]) -> None:
    """The run as a table, with what is needed to read it."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    env, setting, link = (data[key] for key in ("environment", "settings", "link"))
    console.print(
        f"\n{setting['layers']} layers, d={setting['dim']}, {setting['batch']} x "
        f"{setting['seq_len']} tokens per rank, fp32, 2 ranks, gloo\n"
        f"torch {env['torch']}, {env['cpu']}, a core per rank, load at the start "
        f"{env['load_average_1min']}, {env['date']}, commit {env['git_commit']}\n"
        f"link {link['rate_gbit_s']:g} Gbit/s; in each direction an all-reduce sends "
        f"{link['wire_gbit_s']:.3f}; payload of a large all-gather {link['gather_gbit_s']:.3f}, "
        f"many at once {link['gathers_gbit_s']:.3f}, reduce-scatter {link['reduce_gbit_s']:.3f}; "
        f"wire to compute: {data['wire_to_compute']:.2f} ({data['wire_of']} over the floor)"
    )
    caption = "; ".join(f"{k}: {v}" for k, v in COLUMNS.items() if v)
    table = Table("variant", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, variant in data["variants"].items():
        table.add_row(name, *(["failed"] if "failure" in variant else _cells(variant)))
    console.print(table)
    for line in (*data["agreement"], *(f"note: {note}" for note in data["notes"])):
        console.print(line, markup=False)


def _cells(v: dict[str, Any]) -> list[str]:
    low, high = v["step_quartiles_s"]
    ratios = ("to_floor", "fsdp2_eager_over_this", "fsdp2_compiled_over_this")
    cells = [f"{v['step_s']:.3f}", f"{low:.3f}-{high:.3f}"]
    cells += ["-" if v[key] is None else f"{v[key]:.2f}" for key in ratios]
    cells += [f"{v['sent_nbytes'] / 1e6:.0f}", f"{v['wire_s']:.3f}"]
    cells.append(f"{v['optimizer_s']:.3f}")
    if (expected := v.get("predicted")) is None:
        return cells
    mib = (expected["step_nbytes"] / 2**20, v["step_nbytes"] / 2**20)
    predicted = f"{expected['step_s']:.3f} ({v['step_s_error']:+.0%})"
    return [*cells, predicted, f"{mib[0]:.0f} / {mib[1]:.0f} ({v['step_nbytes_error']:+.0%})"]


def _result_path(options: Options) -> Path | None:
    """The given path; the committed file for a run that is fit for it; else none."""
    usual = Options()
    rounds = min(options.rounds, usual.rounds)
    kept = replace(options, json=None, time_limit_s=usual.time_limit_s, rounds=rounds)
    return options.json or (RESULTS if kept == usual else None)


def run(options: Options, argv: Sequence[str]) -> None:
    """Make the network, run the ranks in it, show and write what they measured."""
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as name:
        with network(options.rate_mbit) as names:
            launch(options, argv, names, Path(name))
        data = json.loads(Path(name, "results.json").read_text())
    command = shlex.join(["python", *sys.orig_argv[1:]])
    data["environment"] |= {"command": command, "load_average_1min": load}
    print_report(data)
    if path := _result_path(options):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"written: {path}")


def main() -> None:
    """The command line; what a rank runs if it begins with `--rank RANK CORE OUT`."""
    argv = sys.argv[1:]
    if argv[:1] == ["--rank"]:
        os.sched_setaffinity(0, {int(argv[2])})  # before torch starts threads
        import two_hosts_rank

        return two_hosts_rank.run(parse(argv[4:]), int(argv[1]), Path(argv[3]))
    options = parse(argv)
    if reason := missing():
        return print(f"skipped: {reason}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    try:
        return run(options, argv)
    except NetworkRefusedError as error:
        return print(f"skipped: {error}")
    except KeyboardInterrupt:
        sys.exit("two_hosts: interrupted")


if __name__ == "__main__":
    main()
