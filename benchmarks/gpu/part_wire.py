"""Part c: steps on the modelled wire, every variant, with 1 and with 24 blocks taken by it."""

from __future__ import annotations

import gc
from typing import Any

import measure as measuring
import report
import wire
from cluster_here import cluster_here
from graphed import GRAPHED, REPLAYED
from ledger import Part, part
from rows import Row
from transfers import link
from variants import BUILDERS
from wire_lane import PRIORITY
from workloads import disconnect, rows, use_calibration

from inductor_passes.machine.cluster_file import as_json

# First those that the others are held against, then ours, so that a part cut short says the most.
VARIANTS = (
    "fsdp2_eager",
    "fsdp2_compiled",
    "manual",
    "auto",
    "fsdp2_compiled_graphs",
    "auto_graphs",
    "auto_cudagraphs",
    "auto_regions",
    "torch_manual",
    "torch_auto",
)
ON_CPU = ("fsdp2_eager", "manual")  # which is only to see that the kit works
BLOCKS = (1, 24)
# What depends on the blocks: a graph replays transfers of as many as when it was captured, and auto
# is planned for what they leave to compute.
OF_BLOCKS = {*REPLAYED, "auto", "auto_regions"}


def say(line: str) -> None:
    """Into the log."""
    print(line, flush=True)


class Steps:
    """The variants of a row, built once; then their steps, with so many blocks taken."""

    def __init__(self, run: Part, name: str, row: Row) -> None:
        self._run, self._name, self._row = run, name, row
        self._runner: measuring.Runner | None = None

    def _built(self, blocks: int) -> measuring.Runner:
        if self._runner is None:
            link.blocks = 1
            wire.connect(self._row.world_size)
            steps = 2 if self._run.smallest else 12
            with self._run.turns.shared():
                load = measuring.workload(self._row, self._run.device)
                self._runner = measuring.Runner(load, say, BUILDERS | GRAPHED, self._run.turns)
                measuring.choose_link(self._row, *measuring.calibrate(self._runner, steps))
            link.blocks = blocks
            self._runner.build(ON_CPU if self._run.device.type == "cpu" else VARIANTS)
        return self._runner

    def found(self, blocks: int) -> dict[str, Any]:
        """All variants, in turns."""
        runner = self._built(blocks)
        if blocks != link.blocks:
            link.blocks = blocks
            self._build_again(runner)
        for result in runner.results.values():
            result.samples.clear()
        runner.rounds(*((0, 2) if self._run.smallest else (2, 11)))
        runner.memory()
        data = report.report(self._name, self._row, runner.results, self._run.device)
        for name in REPLAYED & data["variants"].keys():
            _forget_unseen(data["variants"][name])
        del data["environment"]  # it is the file's
        data |= {"blocks": blocks, "stream_priority": PRIORITY}
        data["cluster"] = as_json(cluster_here(self._row, self._run.device))
        return data

    def _build_again(self, runner: measuring.Runner) -> None:
        """Those that were built for another number of blocks."""
        names = [name for name in runner.results if name in OF_BLOCKS]
        for name in names:
            runner.results.pop(name)
            runner.variants.pop(name, None)
        gc.collect()
        runner.build(names)

    def close(self) -> None:
        """Let go of the models and the wire."""
        self._runner = None
        disconnect()
        gc.collect()


def _forget_unseen(variant: dict[str, Any]) -> None:
    """What cannot be seen of a replay is unknown, and not zero."""
    for key in (
        "exposed_s",
        "wire_s",
        "copy_s",
        "collectives",
        "collective_nbytes",
        "memory_nbytes",
    ):
        if key in variant:
            variant[key] = None


def told(cells: dict[str, Any]) -> str:
    """FSDP2, eager and compiled, over ours, of each cell."""
    lines = []
    for name, found in cells.items():
        variants = found.get("variants", {})
        steps = {n: v["step_s"] for n, v in variants.items() if "step_s" in v}
        ours = [n for n in ("auto", "manual") if n in steps]
        lines += [
            f"{name}: {rival} / {ours[0]} {steps[rival] / steps[ours[0]]:.2f}"
            for rival in ("fsdp2_eager", "fsdp2_compiled")
            if ours and rival in steps
        ]
    return "; ".join(lines) or "no cell has both FSDP2 and ours"


def measure(run: Part) -> None:
    """The part."""
    use_calibration(run)
    for name, row in run.each(rows(run)):
        steps = Steps(run, name, row)
        for blocks in BLOCKS[:1] if run.device.type == "cpu" else BLOCKS:
            run.cell(f"{name}, {blocks} blocks", lambda s=steps, b=blocks: s.found(b))
        steps.close()
    run.needs_cuda("24 blocks", "the same steps while a transfer holds 24 blocks of the GPU")
    run.needs_cuda("graphs", f"{', '.join(sorted(REPLAYED))}: steps as CUDA graphs")
    run.finish(told(run.cells))


if __name__ == "__main__":
    measure(part(__doc__))
