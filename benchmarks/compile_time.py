"""How long compiling takes as a model grows: ours, plain ``torch.compile``, FSDP2 by block.

Each cell is a process of its own with caches of its own, which are empty (*cold*), and then a
second process that finds them full (*warm*). A narrow Llama with its loss, on a fake process group
of eight ranks and with one compile thread; counted is the CPU time, the children's included, that
the first forward and backward take beyond the second ones.

    python benchmarks/compile_time.py --layers 4 12 32 126
    python benchmarks/compile_time.py --layers 4 12 32 --device cuda --at-once 8 --json cuda.json
    python benchmarks/compile_time.py --layers 24 --hf gpt2 --variants fsdp2_by_block manual_regions

With ``--hf`` it is a narrow model of transformers with its default dropout, and its own loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

RANKS = 8
RESULTS = Path(__file__).parent / "results" / "compile_time.json"
OURS = {
    f"{bucketing}_{executor}": {"bucketing": bucketing, "executor": executor}
    for bucketing in ("manual", "auto")
    for executor in ("inductor", "regions")
}
VARIANTS = ("plain", "fsdp2_by_block", "fsdp2_whole", *OURS)
# Parts of it, by the names under which torch times them (wall seconds; parts may hold others).
PHASES = {
    "_compile.compile_inner": "Dynamo and all it calls",
    "backend_compile": "backend and all it calls",
    "create_aot_dispatcher_function": "AOTAutograd and all it calls",
    "inductor_compile": "Inductor, all",
    "GraphLowering.run": "Inductor: lowering",
    "Scheduler.__init__": "Inductor: scheduling",
    "Scheduler.codegen": "Inductor: code generation",
}


def cpu_s() -> tuple[float, float]:
    """CPU seconds of this process, and of the children that it has waited for."""
    found = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (usage.ru_utime + usage.ru_stime for usage in found)
    return own, children


def model_of(name: str, layers: int, compiled_loss: bool) -> Any:
    """A narrow model, whose call with tokens and labels gives the loss; and its list of layers."""
    if name == "":
        from rows import Row
        from variants import LlamaCompiledLoss, LlamaLoss

        config = Row(layers=layers, dim=128, vocab=512, seq_len=64).config()
        model = (LlamaCompiledLoss if compiled_loss else LlamaLoss)(config)
        return model, model.layers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    sizes |= {"vocab_size": 512, "max_position_embeddings": 128, "num_hidden_layers": layers}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    heads = {} if name in ("bert", "gpt2") else {"num_key_value_heads": 2, "head_dim": 32}
    config = AutoConfig.for_model(name, use_cache=False, **sizes, **heads)
    is_causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name != "bert"
    model = (AutoModelForCausalLM if is_causal else AutoModelForMaskedLM).from_config(config)
    model.loss_type = "ForCausalLM" if is_causal else "ForMaskedLM"  # or it warns, a graph break

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=labels).loss

    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return Loss(), max(lists, key=len)


def built(variant: str, layers: int, device: str, hf: str) -> Callable[..., Any]:
    """The model of ``variant``, wrapped and to be compiled at its first call."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from simplefsdp import simple_fsdp

    mesh = init_device_mesh(device, (RANKS,))
    torch._dynamo.config.recompile_limit = max(8, 2 * layers)
    by_block = variant == "fsdp2_by_block"
    model, blocks = model_of(hf, layers, by_block)
    model.to(device)
    if variant.startswith("fsdp2"):
        for unit in (*blocks, model):
            if by_block and unit is not model:
                unit.compile()
            fully_shard(unit, mesh=mesh)
        return model if by_block else torch.compile(model)
    if variant == "plain":
        return torch.compile(model)
    simple_fsdp(model, mesh)
    return torch.compile(model, backend="simplefsdp", options=OURS[variant], fullgraph=True)


def measure(variant: str, layers: int, device: str, hf: str) -> dict[str, Any]:
    """Seconds of the first step of ``variant`` beyond the second's, and of torch's phases."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import compilation_time_metrics
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.setrecursionlimit(20_000)  # AOTAutograd's partitioner walks deep graphs recursively
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    run = built(variant, layers, device, hf)
    tokens = torch.zeros(1, 64, dtype=torch.long, device=device)

    def step() -> tuple[float, float, float]:
        began, (own, children) = time.perf_counter(), cpu_s()
        run(tokens, tokens).backward()
        now = cpu_s()
        return now[0] - own, now[1] - children, time.perf_counter() - began

    first, second = step(), step()
    own, children, wall = (a - b for a, b in zip(first, second, strict=True))
    phases = {name: sum(compilation_time_metrics.get(key, ())) for key, name in PHASES.items()}
    return {
        "cpu_s": own + children,
        "compiler_s": children,
        "wall_s": wall,
        "phases_s": {name: round(seconds, 2) for name, seconds in phases.items() if seconds},
    }


def in_process(variant: str, layers: int, device: str, hf: str, cache: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own whose caches are in ``cache``."""
    script = str(Path(__file__))
    done = subprocess.run(
        [
            *(sys.executable, script, "--one", variant, "--layers", str(layers)),
            *("--device", device, "--hf", hf),
        ],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{variant}, {layers} layers:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cold_and_warm(device: str, hf: str, cell: tuple[int, str]) -> dict[str, Any]:
    """A cell: a process that finds nothing compiled, and one that finds all of it."""
    layers, variant = cell
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (in_process(variant, layers, device, hf, cache) for _ in range(2))
    print(
        f"{layers:4} layers, {variant:15}: cold {cold['cpu_s']:6.1f} s CPU (of which compilers "
        f"{cold['compiler_s']:5.1f}), warm {warm['cpu_s']:5.1f}",
        flush=True,
    )
    return {"variant": variant, "layers": layers, "cold": cold, "warm": warm}


def main() -> None:
    """Measure, print a line a cell, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[4, 12, 32, 126])
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--hf", default="", help="model type of transformers, such as gpt2 (default: our Llama)")
    add("--at-once", type=int, default=1, help="cells; more where a lent machine has the cores")
    add("--json", type=Path, help=f"default, for all variants on CPU: {RESULTS}")
    add("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.one:
        print(json.dumps(measure(choice.one, choice.layers[0], choice.device, choice.hf)))
        return
    import torch
    from report import environment

    cells = itertools.product(choice.layers, choice.variants)
    with ThreadPoolExecutor(choice.at_once) as pool:
        found = list(pool.map(partial(cold_and_warm, choice.device, choice.hf), cells))
    whole = (choice.variants, choice.device, choice.hf) == (VARIANTS, "cpu", "")
    target = choice.json or (RESULTS if whole else None)
    if target is not None:
        results = {"environment": environment(torch.device(choice.device)), "cells": found}
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
