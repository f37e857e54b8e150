"""The core plans and simulates without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from programs import layers

SCRIPT = """
import sys
from importlib.abc import MetaPathFinder


class NoTorch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "simplefsdp"):
            raise ImportError(f"{name} was imported")


sys.meta_path.insert(0, NoTorch())

from inductor_passes.ir import buckets, program, text
from inductor_passes.machine import cost, simulate
from inductor_passes.planner import auto, greedy
from inductor_passes.transform import merge, order

layers = text.parse(sys.stdin.read())
fqns = [fqn for _, op in layers.starts() for fqn in op.collective.fqns]
planned = buckets.plan_buckets(layers, buckets.assign_by_module(fqns))
merged = merge.merge(layers, planned)
ordered = merged.reorder(order.overlap(merged, order.OverlapPolicy()))
print(simulate.simulate(ordered, cost.LinearCost()).total_us < 1e9)
print(simulate.memory(ordered).peak_nbytes > 0)
print(text.parse(text.to_text(ordered)) == ordered)
print(auto.plan_auto(layers, cost.LinearCost(), fqns).step_us < 1e9)
print(greedy.plan_greedy(layers, cost.LinearCost(), fqns).step_us < 1e9)
print([name for name in sys.modules if name.split(".")[0] == "torch"])
"""


def test_the_core_runs_without_torch():
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=layers(3, "backward"),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=root,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["True"] * 5 + ["[]"]
