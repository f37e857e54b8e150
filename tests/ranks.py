"""Real ranks for tests: worker processes that are started once and run many test bodies.

Importing torch and its compiler costs seconds: a server does it once and forks the ranks, and a
pool keeps them for many tests. A body is a module-level function that every rank calls with the
same arguments; what it raises on any rank fails the test, with that rank's traceback, and a body
that hangs is killed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp


def server() -> Any:
    """The context of a server that forks ranks, which has done what is in ``warm.py``."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 tells the server no path; without ours it would import another checkout.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(os.path.exists, sys.path)))
        forkserver.ensure_running()
    return context


def compile_as_tests_do() -> None:
    """Let Dynamo not collect garbage after each compilation, which takes as long as a small one's
    passes; nor empty the processor's caches, as it does to tell its own log how long the guards
    take."""
    from torch._dynamo import config, guards

    config.run_gc_after_compile = False
    if hasattr(guards, "profile_guard_manager"):  # of some releases
        guards.profile_guard_manager = lambda *_: 0.0


class RankPool:
    """``world_size`` gloo ranks on this machine."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``body(*args)`` on every rank; returns what each rank returned."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((body, args))
        deadline = time.monotonic() + timeout
        answers = [self._receive(rank, deadline) for rank in range(self.world_size)]
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop()  # collectives may be out of step: start afresh for the next test
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _receive(self, rank: int, deadline: float) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            said = (self._folder / f"{rank}.txt").read_text()[-2000:]
            return False, f"died with exit code {process.exitcode}; its last words: {said}"
        return False, "gave no answer in time"

    def _start(self) -> None:
        context = server()
        self._folder = Path(tempfile.mkdtemp(prefix="simplefsdp-test-ranks-"))
        store = str(self._folder / "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, store, list(sys.path), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._workers.append((process, ours))

    def stop(self) -> None:
        """Kill the workers; the next ``run`` starts new ones."""
        for process, _ in self._workers:
            process.kill()
            process.join()
        if self._workers:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._workers = []


def _serve(rank: int, world_size: int, store: str, path: list[str], pipe: Connection) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    words = os.open(Path(store).with_name(f"{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(words, 2)  # what C++ says before it aborts
    faulthandler.enable()  # and where Python was
    assert "warm" in sys.modules, "the server of the ranks could not import it"
    import torch
    import torch.distributed as dist
    from torch._functorch import config as functorch_config

    functorch_config.enable_autograd_cache = False  # as in conftest.py
    gc.set_threshold(50_000, 20, 100)  # as in conftest.py
    compile_as_tests_do()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    while True:
        body, args = pipe.recv()
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send((True, body(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
