"""Do functional all-gathers over gloo corrupt memory? Torch's own kernel against ours.

Two ranks keep seven small all-gathers in flight, of which one is of two tensors, again and again,
and do nothing else. A trial is such a pair of processes; it ends after its seconds, or dies, or is
stopped because it hangs. The kernels take turns. ``torch`` has nothing of this project in it;
``ours`` has ``simplefsdp/_torch/gloo.py``.

    python benchmarks/gloo_gathers.py --trials 10 --seconds 20
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import environment

RANKS = 2
TENSORS = 8
RESULTS = Path(__file__).parent / "results" / "gloo_gathers.json"
_AT_ONCE = 100  # rounds between two looks at the clock
_LATE_S = 60.0  # to start and to leave


def gather_again_and_again(rank: int, kernel: str, seconds: float, folder: str, told: Any) -> None:
    """One rank of a trial; it counts its gathers in ``told``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    if kernel == "ours":
        from simplefsdp._torch import mend_gloo_gathers

        mend_gloo_gathers()
    group = dist.distributed_c10d._get_default_group().group_name
    shards = [torch.full((8 + i,), float(rank)) for i in range(TENSORS)]
    ops = torch.ops._c10d_functional
    ended, deadline = torch.zeros(1), time.monotonic() + seconds
    while not ended:
        for _ in range(_AT_ONCE):
            launched = [ops.all_gather_into_tensor(shard, RANKS, group) for shard in shards[2:]]
            pair = ops.all_gather_into_tensor_coalesced(shards[:2], RANKS, group)
            for full in (*launched, *pair):
                ops.wait_tensor(full)
        told.value += _AT_ONCE * (TENSORS - 1)
        ended.fill_(time.monotonic() > deadline)
        dist.all_reduce(ended)
    dist.barrier()
    dist.destroy_process_group()


def trial(kernel: str, seconds: float) -> dict[str, Any]:
    """How the ranks of one trial ended, and after how many gathers."""
    context = multiprocessing.get_context("spawn")
    told = [context.Value("q", 0) for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=gather_again_and_again, args=(r, kernel, seconds, folder, told[r])
            )
            for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + seconds + _LATE_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
    died = any(code is not None and code < 0 for code in codes)
    end = "died" if died else "hung" if None in codes else "failed" if any(codes) else "ended"
    return {"kernel": kernel, "end": end, "exit_codes": codes, "gathers": told[0].value}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10, help="of each kernel")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a trial that ends")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    trials = []
    for _ in range(options.trials):
        for kernel in ("torch", "ours"):
            trials.append(trial(kernel, options.seconds))
            print(trials[-1], flush=True)
    found = {
        kernel: {
            "gathers": sum(t["gathers"] for t in trials if t["kernel"] == kernel),
            **Counter(t["end"] for t in trials if t["kernel"] == kernel),
        }
        for kernel in ("torch", "ours")
    }
    print(json.dumps(found, indent=1))
    result = {"environment": environment(torch.device("cpu")), **found, "trials": trials}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
