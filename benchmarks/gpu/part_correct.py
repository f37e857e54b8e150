"""Part b: two ranks on one GPU against one process; then the tests that can run on a device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from correct_rank import CASES, RANKS
from ledger import Part, part
from on_device import packs_alike

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Of which each takes another way through the kit, which is all that there is to see.
ON_CPU = (
    "eager",
    "hybrid auto",
    "checkpointed in full",
    "every other member packed",
    "cudagraphs",
    "regions",
)
_CASE_S = 90.0  # of one pair of ranks, for one case, and for each further one:
_FURTHER_S = 10.0
_SUITE_S = 240.0


def rank_environment(rank: int, device: str) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU, unless it takes them for two hosts."""
    known = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device != "cuda":
        return known
    return known | {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def on_ranks(cases: Sequence[str], device: str) -> list[dict[str, Any]]:
    """What each of two ranks found of each case.

    A pair of processes for few cases: two ranks on one GPU are good for some 30 collectives.
    """
    with tempfile.TemporaryDirectory(prefix="simplefsdp-gpu-kit-") as folder:
        answers = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
        script, store = str(HERE / "correct_rank.py"), str(Path(folder, "store"))
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), store, device, str(answers[rank]), *cases],
                env=rank_environment(rank, device),
            )
            for rank in range(RANKS)
        ]
        limit_s = _CASE_S + _FURTHER_S * (len(cases) - 1)
        try:
            codes = [process.wait(limit_s) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes) or not codes:
            ended = f"exit codes {codes}" if codes else f"no end after {limit_s:.0f} s"
            silent = {"ok": False, "failure": f"{ended}; the log says why"}
            return [_read(path) or dict.fromkeys(cases, silent) for path in answers]
        return [json.loads(path.read_text()) for path in answers]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def parity(cases: Sequence[str], device: str) -> dict[str, dict[str, Any]]:
    """Of each case, the ranks' findings; a failure if any of them is not as it should be."""
    ranks = on_ranks(cases, device)
    found = {}
    for case in cases:
        each = [rank.get(case, {"ok": False, "failure": "never ran"}) for rank in ranks]
        found[case] = {"ranks": each}
        if not all(one["ok"] for one in each):
            why = next((one["failure"] for one in each if "failure" in one), "it differs")
            found[case]["failure"] = why
    return found


def packing(device: torch.device) -> dict[str, Any]:
    """The kernel that packs and unpacks, case by case, against its plain twin, bit for bit."""
    found = packs_alike(device)
    differ = [name for name, alike in found.items() if not all(alike.values())]
    failure = {"failure": f"not the twin's bits: {', '.join(differ)}"} if differ else {}
    return {"cases": found, **failure}


def suite(device: str, workers: int) -> dict[str, Any]:
    """The tests that can run on a device: one rank, or none."""
    tests = ["--slow", "tests/test_on_device.py"]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        tests += ["-n", str(workers)]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *tests]
    environment = {**os.environ, "SIMPLEFSDP_TEST_DEVICE": device}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SUITE_S,
        check=False,
    )
    print(done.stdout, done.stderr, flush=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    found: dict[str, Any] = {"told": last, "exit_code": done.returncode}
    return found if done.returncode == 0 else {**found, "failure": last}


def measure(run: Part) -> None:
    """The part."""
    device = run.device.type
    asked = tuple(CASES) if device == "cuda" else ON_CPU
    left = [case for case in asked if not run.has(case)]
    # On CPU all at once: starting two processes takes longer than the cases.
    batches = [[case] for case in left] if device == "cuda" else [left] if left else []
    with run.turns.shared(), ThreadPoolExecutor(3 if run.side_by_side else 1) as workers:
        for future in as_completed([workers.submit(parity, cases, device) for cases in batches]):
            for case, found in future.result().items():
                run.put(case, found)
        run.cell("packing", lambda: packing(run.device))
        if run.smallest:
            run.put("suite", {"told": "left out by --smallest"})
        elif importlib.util.find_spec("pytest") is None:
            run.put("suite", {"needs": "needs pytest: see benchmarks/gpu/README.md"})
        else:
            run.cell("suite", lambda: suite(device, 6 if run.side_by_side else 1))
    fine = sum("failure" not in run.cells[case] for case in asked)
    told = run.cells["suite"]
    run.finish(
        f"{fine} of {len(asked)} cases agree with one process; packing "
        f"{run.cells['packing'].get('failure', 'bit for bit')}; tests on the device: "
        f"{told.get('told') or told.get('needs') or told.get('failure')}"
    )


if __name__ == "__main__":
    measure(part(__doc__))
