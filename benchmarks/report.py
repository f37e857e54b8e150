"""What a run says: a table for people, JSON for the figure and RESULTS.md."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compare import Agreement, Limit, agreements, limit_of
from measure import Result
from rows import Row
from torch_passes import GPU_PROBES_REPLACED
from transfers import link

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def environment(device: torch.device) -> dict[str, Any]:
    """Where and how it was measured."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git_commit": git_commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


@functools.cache
def git_commit() -> str:
    """The checkout's, and whether it was changed, when first asked: what runs was read by then.
    Results that lie in it change nothing."""

    def git(*args: str) -> str:
        here = Path(__file__).parent
        command = ["git", "-C", str(here), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # a machine without git
            return ""
        return done.stdout.strip()

    changed = git("status", "-s", "--", ":/", ":(exclude,top)benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + (" + changes" if changed else "")


def report(name: str, row: Row, results: dict[str, Result], device: torch.device) -> dict[str, Any]:
    """The whole run as plain data."""
    limit = limit_of(row, results)
    agreement = agreements(results)
    return {
        "row": name,
        "settings": dataclasses.asdict(row),
        "environment": environment(device),
        "link": {
            "latency_us": link.latency_s * 1e6,
            "bandwidth_gb_s": link.bandwidth / 1e9,
            "wire_to_compute": limit.wire_s / limit.compute_s,
        },
        "limit": {**dataclasses.asdict(limit), "total_s": limit.total_s},
        "agreement_tolerance": TOLERANCE[row.dtype],
        "notes": _notes(results, device),
        "variants": {
            variant: _variant(result, results, limit, agreement.get(variant))
            for variant, result in results.items()
        },
    }


def _notes(results: dict[str, Result], device: torch.device) -> list[str]:
    notes = []
    if device.type == "cpu" and {"torch_manual", "torch_auto"} & set(results):
        notes.append(GPU_PROBES_REPLACED)
    floor = [s.step_s for s in results["floor"].samples]
    slow = sum(seconds > 1.25 * min(floor) for seconds in floor)
    if 4 * slow > len(floor):
        notes.append(
            f"NOISY: in {slow} of {len(floor)} rounds the floor took more than 1.25 times its "
            "fastest; something else uses this machine, so measure again"
        )
    return notes


def _variant(
    result: Result, results: dict[str, Result], limit: Limit, agreement: Agreement | None
) -> dict[str, Any]:
    if not result.ok:
        return {"failure": result.failure or "never ran"}
    steps = [s.step_s for s in result.samples]
    quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3
    last = result.samples[-1]
    return {
        "step_s": result.step_s,
        "step_quartiles_s": [quartiles[0], quartiles[2]],
        "rounds_s": steps,
        "optimizer_s": result.median(lambda s: s.optimizer_s),
        "to_floor": result.step_s / limit.compute_s,
        "to_limit": result.step_s / limit.total_s,
        "fsdp2_eager_over_this": _over(results, "fsdp2_eager", result),
        "fsdp2_compiled_over_this": _over(results, "fsdp2_compiled", result),
        "exposed_s": result.median(lambda s: s.exposed_s),
        "wire_s": result.median(lambda s: s.wire_s),
        "copy_s": result.median(lambda s: s.copy_s),
        "collectives": last.counts,
        "collective_nbytes": sum(t.nbytes for t in last.transfers),
        "build_s": result.compile_s,
        "loss": last.loss,
        "agreement": dataclasses.asdict(agreement) if agreement else None,
        "memory_nbytes": _memory(result, results["floor"]),
    }


def _over(results: dict[str, Result], name: str, result: Result) -> float | None:
    other = results.get(name)
    return other.step_s / result.step_s if other is not None and other.ok else None


def _memory(result: Result, floor: Result) -> dict[str, int] | None:
    memory = result.memory
    if memory is None:
        return None
    data = {**dataclasses.asdict(memory), "total_peak": memory.total_peak}
    if floor.memory is not None:
        data["above_floor"] = memory.step_peak - floor.memory.step_peak
    return data


def print_report(data: dict[str, Any]) -> None:
    """The run as a table, with what is needed to read it."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200)
    settings, env, limit = data["settings"], data["environment"], data["limit"]
    console.print(
        f"\n[bold]{data['row']}[/]: {settings['layers']} layers, d={settings['dim']}, "
        f"{settings['batch']} x {settings['seq_len']} tokens, {settings['dtype']}, "
        f"{settings['world_size']} virtual ranks; wire {data['link']['bandwidth_gb_s']:.3g} GB/s, "
        f"{data['link']['latency_us']:.0f} us"
    )
    console.print(
        f"torch {env['torch']}, {env['cpu']}, {env['threads']} threads of {env['cores']} cores, "
        f"load {env['load_average_1min']}, {env['date']}, commit {env['git_commit']}"
    )
    console.print(
        f"limit {limit['total_s']:.3f} s = max(compute {limit['compute_s']:.3f}, wire "
        f"{limit['wire_s']:.3f} of {limit['wire_of']}) + embedding's gather "
        f"{limit['first_gather_s']:.3f} + embedding's reduce {limit['last_reduce_s']:.3f}"
    )
    console.print(_table(data))
    _print_agreement(console, data)
    for note in data["notes"]:
        console.print(f"note: {note}")


COLUMNS = {
    "step s": "forward and backward, median",
    "quartiles": "",
    "/floor": "",
    "/limit": "",
    "eager/x": "FSDP2 eager / this",
    "comp/x": "FSDP2 compiled / this",
    "exposed s": "slept in waits",
    "wire s": "wire busy",
    "copy s": "copies in the place of a NIC",
    "gathers": "",
    "reduces": "",
    "optim s": "",
    "step MiB": "peak of what a step allocates",
    "held MiB": "parameters, optimizer state, buffers",
    "total MiB": "both",
}


def _table(data: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="; ".join(f"{k}: {v}" for k, v in COLUMNS.items() if v),
    )
    table.add_column("variant", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, variant in data["variants"].items():
        cells = _cells(variant) if "failure" not in variant else ["failed"]
        table.add_row(name, *cells)
    return table


def _cells(v: dict[str, Any]) -> list[str]:
    count, memory = v["collectives"], v["memory_nbytes"]
    reduces = count.get("reduce", 0) + count.get("all_reduce", 0)
    low, high = v["step_quartiles_s"]
    cells = [f"{v['step_s']:.3f}", f"{low:.3f}-{high:.3f}"]
    cells += [f"{v['to_floor']:.2f}", f"{v['to_limit']:.2f}"]
    cells += [_ratio(v["fsdp2_eager_over_this"]), _ratio(v["fsdp2_compiled_over_this"])]
    cells += [f"{v[key]:.3f}" for key in ("exposed_s", "wire_s", "copy_s")]
    cells += [str(count.get("gather", 0)), str(reduces), f"{v['optimizer_s']:.3f}"]
    if memory is not None:
        held = memory["total_peak"] - memory["step_peak"]
        cells += [f"{n / 2**20:.0f}" for n in (memory["step_peak"], held, memory["total_peak"])]
    return cells


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _print_agreement(console: Console, data: dict[str, Any]) -> None:
    for name, variant in data["variants"].items():
        if "failure" in variant:
            console.print(f"[red]{name} failed[/]: {variant['failure']}", markup=True)
        elif variant["agreement"] is not None:
            a, tolerance = variant["agreement"], data["agreement_tolerance"]
            verdict = "agrees" if max(a["first_loss"], a["gradient"]) <= tolerance else "DIFFERS"
            console.print(
                f"{name} {verdict} with {a['reference']} (tolerance {tolerance:g}): first loss "
                f"{a['first_loss']:.1e}, worst gradient {a['gradient']:.1e}, last loss "
                f"{a['last_loss']:.1e}, relative"
            )
