"""How long our passes take as the model grows: Llama 3 from 8B's 32 layers to 405B's 126.

The depth is the real one, and so is the number of nodes in the graphs; the width is small, since
no pass looks at data and the machine may have little memory. Traced on a fake process group. The
time of each pass is its own, in CPU seconds, without tracing, partitioning or lowering. With
``--executor inductor`` the scheduler pass is there, too; kernels are generated, but not compiled.

The growth exponent is the slope of log(seconds) over log(nodes), by least squares.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import environment
from torch._inductor.async_compile import AsyncCompile
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule

from inductor_passes.passes import ImposeOrder, bucket_and_reorder, rehearse
from simplefsdp import _torch, simple_fsdp
from simplefsdp.compiler.backend import pass_settings
from simplefsdp.compiler.census import describe_passes
from simplefsdp.compiler.dedupe import dedupe_gathers
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama
from simplefsdp.provenance import carried_fqn as fqn_of

LAYERS = {"8B": 32, "70B": 80, "405B": 126}
RANKS = 8
RESULTS = Path(__file__).parent / "results" / "planning.json"


class Stopwatch:
    """Seconds by name, and the largest graph seen."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nodes = 0

    def time(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = function(*args, **kwargs)
        self.seconds[name] += time.process_time() - began
        return result


@dataclass(frozen=True)
class Timed:
    """A scheduler pass that is timed."""

    inner: ImposeOrder
    stopwatch: Stopwatch

    def __call__(self, snodes: list[Any]) -> list[Any]:
        return self.stopwatch.time("impose_order", self.inner, snodes)


def backend(stopwatch: Stopwatch, options: Options) -> Callable[..., Any]:
    """A Dynamo backend like simplefsdp's, with a stopwatch around each pass."""

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        specs = stopwatch.time("dedupe_gathers", dedupe_gathers, gm, inputs)
        device = torch.device("cpu")
        fqns = [spec.fqn for spec in specs]
        settings = stopwatch.time("assign_by_module", pass_settings, options, fqns, device)

        def joint_pass(graph: Graph) -> None:
            stopwatch.time("tag_for_recompute", tag_for_recompute, graph)

        planned: list[Any] = [None]

        def observe(graph: GraphModule, is_backward: bool) -> None:
            found = stopwatch.time("rehearse", rehearse, graph, settings, fqn_of)
            planned[0] = found.planned
            stopwatch.time("log line", describe_passes, found, settings)

        def graph_pass(graph: Graph) -> None:
            stopwatch.nodes += len(graph.nodes)
            stopwatch.time(
                "bucket_and_reorder", bucket_and_reorder, graph, settings, fqn_of, planned[0]
            )

        passes = {"observe": observe, "joint_pass": joint_pass, "graph_pass": graph_pass}
        if options.executor == "aot_eager":
            return _torch.compile_with_aot_eager(gm, inputs, **passes)
        order = Timed(ImposeOrder(settings.policy, False, ""), stopwatch)
        return _torch.compile_with_inductor(
            gm,
            inputs,
            **passes,
            scheduler_pass=order,
            lowering=nullcontext,
            uuid=lambda: "none",
        )

    return compile_graph


def measure(layers: int, options: Options) -> dict[str, Any]:
    """Compile a narrow Llama of so many layers and return the seconds of each pass."""
    torch._dynamo.reset()
    config = replace(CONFIGS["debug"], n_layers=layers, dim=64, ffn_dim=128, vocab_size=256)
    config = replace(config, n_heads=4, n_kv_heads=2)
    model = simple_fsdp(Llama(config), init_device_mesh("cpu", (RANKS,)))
    stopwatch = Stopwatch()
    began = time.perf_counter()
    run = torch.compile(model, backend=backend(stopwatch, options), fullgraph=True)
    run(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    return {
        "layers": layers,
        "nodes": stopwatch.nodes,
        "passes_s": sum(stopwatch.seconds.values()),
        "by_pass_s": dict(stopwatch.seconds),
        "compile_s": time.perf_counter() - began,
    }


def exponent(rows: Sequence[dict[str, Any]]) -> float:
    """Slope of log(seconds) over log(nodes), by least squares."""
    points = [(math.log(row["nodes"]), math.log(row["passes_s"])) for row in rows]
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--executor", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, *LAYERS.values()])
    parser.add_argument(
        "--json", type=Path, help="default, for the default layers: " + str(RESULTS)
    )
    choice = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.setrecursionlimit(20_000)  # AOTAutograd's partitioner walks deep graphs recursively
    torch._inductor.config.force_disable_caches = True
    # Kernels are of no interest here, and would take hours.
    AsyncCompile.cpp_pybinding = lambda *_, **__: lambda *args: None
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    options = Options(bucketing="manual", executor=choice.executor)
    measure(2, options)  # imports and first calls
    rows = []
    for layers in choice.layers:
        rows.append(row := measure(layers, options))
        parts = ", ".join(f"{name} {s:.2f}" for name, s in row["by_pass_s"].items())
        print(
            f"{layers:4} layers, {row['nodes']:6} nodes forward and backward: passes "
            f"{row['passes_s']:.2f} s of {row['compile_s']:.0f} s ({parts})",
            flush=True,
        )
    slope = exponent(rows) if len(rows) > 1 else None
    if slope is not None:
        print(f"growth exponent over nodes: {slope:.2f}")
    target = choice.json or (RESULTS if choice.layers == parser.get_default("layers") else None)
    if target is not None:
        results = {
            "environment": environment(torch.device("cpu")),
            "executor": choice.executor,
            "rows": rows,
            "growth_exponent": slope,
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
