"""Peak memory of each rank while it loads a checkpoint into its shards and saves it from them.

A random checkpoint of few layers with the widths of Llama 3 8B, in bfloat16, goes into a model
that was built on meta and wrapped, and out again, on real gloo ranks. Counted is what Linux says
is resident, above what it was with everything imported and the process group made:

    anonymous   memory that the process owns: the shards, and what is on its way
    file        pages of mapped files: what a rank has read of a file that is still open; the
                system takes them back when it needs memory
    resident    the peak of both together, as the kernel keeps it (VmHWM)

The bound is the rank's share of the model and one file. The saved files are compared with the
loaded ones, tensor by tensor, bit by bit.

    python benchmarks/checkpoint_memory.py
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from report import environment
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import load_pretrained, save_pretrained, simple_fsdp
from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.pretrained.files import entries_of
from simplefsdp.pretrained.writer import Writer, complete_folder, in_files

RESULTS = Path(__file__).parent / "results" / "checkpoint_memory.json"
_ROWS = 1 << 12  # that are drawn at once


def config_of(layers: int) -> Any:
    """Llama 3 8B, of few layers."""
    return transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        dtype="bfloat16",
    )


def on_meta(config: Any) -> Any:
    """The model without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make(folder: Path, config: Any, max_nbytes: int) -> None:
    """Write a random checkpoint, a few rows at a time."""
    generator = torch.Generator().manual_seed(0)
    tensors = on_meta(config).state_dict()
    with complete_folder(folder) as partial:
        writer = Writer(partial)
        for batch in in_files(tensors.items(), max_nbytes):
            with writer.file(batch) as write:
                for name, tensor in batch.items():
                    for first in range(0, tensor.shape[0], _ROWS):
                        rows = torch.empty(tensor[first : first + _ROWS].shape, dtype=tensor.dtype)
                        write(name, first, rows.uniform_(-0.1, 0.1, generator=generator))
        writer.finish()
        config.save_pretrained(partial)


def resident() -> dict[str, int]:
    """Bytes of this process, by the kernel's words for them."""
    words = ("RssAnon", "RssFile", "VmRSS", "VmHWM")
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0][:-1] in words}


@contextmanager
def peaks(baseline: dict[str, int], into: dict[str, Any]) -> Iterator[None]:
    """Add to ``into`` what is at most resident inside, above ``baseline``, and the seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    highest = {"RssAnon": 0, "RssFile": 0}
    done = threading.Event()

    def watch() -> None:
        while True:
            now = resident()
            highest.update({word: max(most, now[word]) for word, most in highest.items()})
            if done.wait(0.003):
                return

    watcher = threading.Thread(target=watch)
    began = time.perf_counter()
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    into["seconds"] = round(time.perf_counter() - began, 2)
    into["resident_peak"] = resident()["VmHWM"] - baseline["VmRSS"]
    into["anonymous_peak"] = highest["RssAnon"] - baseline["RssAnon"]
    into["file_peak"] = highest["RssFile"] - baseline["RssFile"]


def rank_main(rank: int, ranks: int, folder: str, layers: int, max_nbytes: int) -> None:
    """One rank: load, save, and leave what was measured beside the checkpoint."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dist.all_reduce(torch.ones(1))
    model = simple_fsdp(on_meta(config_of(layers)), mesh)
    gc.collect()
    baseline = resident()
    found: dict[str, Any] = {"rank": rank, "baseline": baseline["VmRSS"], "load": {}, "save": {}}
    steps: dict[str, Callable[[], Any]] = {
        "load": lambda: load_pretrained(model, f"{folder}/original"),
        "save": lambda: save_pretrained(model, f"{folder}/saved", max_shard_size=max_nbytes),
    }
    for name, step in steps.items():
        dist.barrier()
        with peaks(baseline, found[name]):
            step()
    found["share"] = local_nbytes([*model.parameters(), *model.buffers()])
    Path(f"{folder}/rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def differences(one: Path, other: Path) -> list[str]:
    """Names that are not in both folders with the same bits."""
    here, there = entries_of(one), entries_of(other)
    found = sorted(here.keys() ^ there.keys())
    for name in here.keys() & there.keys():
        tensors = []
        for entry in (here[name], there[name]):
            with safe_open(entry.file, framework="pt") as file:
                tensors.append(file.get_tensor(name))
        if tensors[0].dtype != tensors[1].dtype or not torch.equal(*tensors):
            found.append(name)
    return found


def measure(ranks: int, layers: int, max_nbytes: int, place: str | None) -> dict[str, Any]:
    """Make a checkpoint, have it loaded and saved, and gather what the ranks found."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        make(Path(folder) / "original", config_of(layers), max_nbytes)
        entries = entries_of(Path(folder) / "original")
        files = {entry.file for entry in entries.values()}
        mp.start_processes(
            rank_main, (ranks, folder, layers, max_nbytes), ranks, start_method="spawn"
        )
        found = [json.loads(Path(f"{folder}/rank-{r}.json").read_text()) for r in range(ranks)]
        return {
            "layers": layers,
            "ranks": ranks,
            "files_nbytes": sorted(file.stat().st_size for file in files),
            "saved_files_differ": differences(Path(f"{folder}/original"), Path(f"{folder}/saved")),
            "by_rank": found,
        }


def summarise(results: dict[str, Any]) -> None:
    """Add each rank's bound, and whether it was kept; print a line for each."""
    largest = max(results["files_nbytes"])
    total = sum(results["files_nbytes"])
    print(f"checkpoint {total / 1e9:.2f} GB, largest file {largest / 1e9:.2f} GB; GB by rank:")
    for rank in results["by_rank"]:
        bound = rank["bound"] = rank["share"] + largest
        rank["within_bound"] = all(rank[step]["resident_peak"] < bound for step in ("load", "save"))
        words = [f"rank {rank['rank']}: share {rank['share'] / 1e9:.2f}, bound {bound / 1e9:.2f}"]
        for step in ("load", "save"):
            parts = [f"{k} {rank[step][f'{k}_peak'] / 1e9:.2f}" for k in ("anonymous", "file")]
            peak = rank[step]["resident_peak"] / 1e9
            words.append(f"{step} {peak:.2f} ({', '.join(parts)})")
        print("; ".join([*words, "within" if rank["within_bound"] else "NOT WITHIN"]))
    differ = results["saved_files_differ"]
    print(f"saved files: {', '.join(differ) + ' differ' if differ else 'equal, bit for bit'}")


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default 2)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--file-gb", type=float, default=1.1, help="size of a file (default 1.1)")
    parser.add_argument("--folder", help="where twice the checkpoint fits (default: as tempfile)")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    choice = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = measure(choice.ranks, choice.layers, int(choice.file_gb * 1e9), choice.folder)
    summarise(results)
    results = {"environment": environment(torch.device("cpu")), **results}
    choice.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"wrote {choice.json}")


if __name__ == "__main__":
    main()
