"""One cell of the matrix in processes of its own, so that a crash or a hang ends nothing else."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
import warnings
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 2
GRACE_S = 10.0  # that a rank has to say why, when another has failed
_PRELOADED = ["models_rank", "torch._inductor.compile_fx", "transformers.modeling_utils"]


class Cell(NamedTuple):
    """What is run: a model under a system (``"auto"``, ``"manual"`` or ``"fsdp2"``)."""

    model: str
    system: str
    executor: str
    timeout_s: float


def server() -> ForkServerContext:
    """A server that has imported torch once, and forks every rank."""
    context = mp.get_context("forkserver")
    # Ranks end without cleaning up, which a tracker of semaphores would remark on.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_cell(context: ForkServerContext, cell: Cell) -> dict[str, Any]:
    """Run a cell; what rank 0 found, or the first error of any rank."""
    folder = Path(tempfile.mkdtemp(prefix="models-"))
    ranks = []
    for rank in range(RANKS):
        process = context.Process(target=_rank, args=(rank, str(folder), cell, sys.path))
        process.start()
        ranks.append(process)
    try:
        _wait(ranks, folder, cell.timeout_s)
        return _found(ranks, folder, cell.timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(ranks: list[BaseProcess], folder: Path, timeout_s: float) -> None:
    """Until all ranks are done, or one has failed and the others had time to say so, too."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        ended = [rank for rank, p in enumerate(ranks) if not p.is_alive()]
        if not failed and any("error" in _answer(folder, r, ranks[r]) for r in ended):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _answer(folder: Path, rank: int, process: BaseProcess) -> dict[str, Any]:
    path = folder / f"{rank}.json"
    if path.exists():
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer
    if process.is_alive():
        return {}
    return {"error": f"rank {rank} died with exit code {process.exitcode}"}


def _found(ranks: list[BaseProcess], folder: Path, timeout_s: float) -> dict[str, Any]:
    answers = [_answer(folder, rank, process) for rank, process in enumerate(ranks)]
    # A rank that only lost its peer says less than the peer.
    errors = [answer for answer in answers if "error" in answer]
    lost = ("Connection closed by peer", "Connection reset by peer", "died with")
    errors.sort(key=lambda answer: any(words in answer["error"] for words in lost))
    if errors:
        found = errors[0]
    elif all(answers):
        found = answers[0]
    else:
        found = {"error": f"no answer within {timeout_s:g} s"}
    if "error" in found:
        words = [(folder / f"{rank}.txt").read_text()[-4000:] for rank in range(RANKS)]
        said = [f"rank {rank}'s words:\n{text}" for rank, text in enumerate(words)]
        found["trace"] = "\n".join([found.get("trace", ""), *said])
    return found


def _rank(rank: int, folder: str, cell: Cell, path: list[str]) -> None:
    """The body of a process: its answer goes into a file, its words into another."""
    sys.path[:] = path
    words = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # cold, as at a first try
    faulthandler.dump_traceback_later(max(1.0, cell.timeout_s - 5))  # where it hangs, if it does
    warnings.filterwarnings("ignore")

    import torch
    import torch._inductor.config
    import torch.distributed as dist
    from models_rank import compare, failure

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # as many as there are cores for it
    try:
        store = dist.FileStore(f"{folder}/store", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        answer = compare(cell.model, cell.system, cell.executor)
    except BaseException as error:
        answer = failure(error)
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(answer))
    part.rename(Path(folder) / f"{rank}.json")
    os._exit(0)  # not waiting for a peer that may be gone
