"""Run a script on ranks as torchrun does, in processes that are forked with torch imported."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import server


@contextmanager
def ranks_of(script: Path, ranks: int) -> Iterator[list[Any]]:
    """The processes of a script's ranks, which are killed in the end."""
    context = server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    try:
        for rank in range(ranks):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=_rank, args=(script, own), daemon=True))
            processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def launch(script: Path, ranks: int, timeout: float = 120.0) -> str:
    """What the ranks printed, one after another; each one's folder is that of the script.

    Raises:
        AssertionError: a rank failed, or gave no end.
    """
    with ranks_of(script, ranks) as processes:
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break  # the others wait for it
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
    said = [script.with_suffix(f".{rank}.err").read_text()[-3000:] for rank in range(ranks)]
    assert codes == [0] * ranks, f"{codes}\n" + "\n".join(said)
    return "".join(script.with_suffix(f".{rank}.out").read_text() for rank in range(ranks))


def _rank(script: Path, environment: dict[str, str]) -> None:
    for stream, kind in ((1, "out"), (2, "err")):
        path = script.with_suffix(f".{environment['RANK']}.{kind}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(script.parent)
    os.environ.update(environment)
    sys.argv = [str(script)]
    import torch

    torch.set_num_threads(1)
    torch.seed()  # as each process begins: ranks draw other numbers
    runpy.run_path(str(script), run_name="__main__")
