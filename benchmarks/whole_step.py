"""Whole training steps on a modelled wire: one program against a forward, a backward and an update.

A step is forward, loss, backward, clipping and AdamW. Real compute and
memory in one process that stands for all ranks, as in step.py; the variants take turns. Examples:

    python benchmarks/whole_step.py
    python benchmarks/whole_step.py --row small --rounds 5
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rows import ROWS

RESULTS = Path(__file__).parent / "results"
MAX_NORM = 1.0  # of gradients
LR = 1e-4
VARIANTS = (
    "floor",
    "auto",
    "auto_update",
    "step_none",
    "step_manual",
    "step_auto",
    "fsdp2_eager",
    "fsdp2_compiled",
    "fsdp2_compiled_update",
)


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    row: str = "default"
    """Row of step.py's grid: the model and the wire."""
    variants: tuple[str, ...] = VARIANTS
    """floor: no communication. auto: as the README says, the update eager. *_update: that
    compiled by torch.compile(optimizer.step). step_*: simplefsdp.compile_step. fsdp2_*: of
    variants.py."""
    rounds: int = 7
    """Timed rounds; each steps every variant once."""
    warmup: int = 2
    """Rounds before those."""
    json: Path | None = None
    """Where to write the results. Default: benchmarks/results/whole_step_<row>.json, if the other
    options are as they are."""


class Training(NamedTuple):
    """A variant: a step gives its loss."""

    step: Callable[[], float]
    held_nbytes: int


@dataclass
class Seen:
    """What was measured of a variant: of each round seconds, seconds exposed; at last the rest."""

    step_s: list[float]
    exposed_s: list[float]
    losses: list[float]
    compile_s: float = 0.0
    launches: dict[str, int] | None = None
    peak_nbytes: int = 0


def _compiled_update(optimizer: Any) -> Callable[[], None]:
    """The update by torch.compile, as its users write it: the learning rate a tensor."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return torch.compile(optimizer.step)  # type: ignore[no-any-return]


def separate(name: str, load: Any) -> Training:
    """Forward and backward of a variant of variants.py, then clipping, then the update: if it is
    not compiled, on a GPU the fused one."""
    import torch
    from torch.nn.utils import clip_grad_norm_ as clip_plain
    from variants import BUILDERS

    from simplefsdp import clip_grad_norm_

    variant = BUILDERS[name.removesuffix("_update")](load)
    params = list(variant.params.values())
    if name == "floor" or name.endswith("_update"):
        update = _compiled_update(variant.optimizer)
    else:
        fused = load.device.type == "cuda" or None
        variant.optimizer = torch.optim.AdamW(params, lr=LR, fused=fused)
        update = variant.optimizer.step
    clip = clip_grad_norm_ if variant.is_sharded else clip_plain

    def step() -> float:
        loss = variant.step(load.tokens, load.targets)
        loss.backward()
        clip(params, MAX_NORM)
        update()
        variant.optimizer.zero_grad()
        return float(loss.detach())

    return Training(step, variant.extra_nbytes)


def whole(bucketing: str, load: Any) -> Training:
    """A step of one program."""
    import torch
    from cluster_here import cluster_here
    from variants import _wrapped

    from simplefsdp import compile_step

    model = _wrapped(load)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    options: dict[str, Any] = {"bucketing": bucketing, "executor": "inductor"}
    if bucketing == "auto":
        options["cluster"] = cluster_here(load.row, load.device)
    train = compile_step(model, optimizer, max_norm=MAX_NORM, options=options)
    return Training(lambda: float(train(load.tokens, load.targets).loss), 0)


def build(name: str, load: Any) -> Training:
    """The variant of that name."""
    kind, _, bucketing = name.partition("_")
    return whole(bucketing, load) if kind == "step" else separate(name, load)


def measured(
    load: Any, variants: Sequence[str], rounds: int, warmup: int, turns: Any
) -> dict[str, Any]:
    """All variants, each round in turns.

    Args:
        load: ``Workload`` of variants.py.
        variants: names, see :class:`Options`.
        rounds: timed ones.
        warmup: rounds before those.
        turns: ``Turns`` of measure.py, for what shares the device.

    Returns:
        Of each variant what :class:`Seen` has, as plain data.
    """
    import torch
    from memory import allocated_peak

    trained: dict[str, Training] = {}
    seen: dict[str, Seen] = {}
    for name in variants:
        torch.manual_seed(0)
        begin = time.perf_counter()
        with turns.shared():
            trained[name] = build(name, load)
            seen[name] = Seen([], [], [trained[name].step()])
        seen[name].compile_s = time.perf_counter() - begin
        print(f"{name}: first step {seen[name].compile_s:.1f} s", flush=True)
    with turns.alone():
        _rounds(trained, seen, range(-warmup, rounds))
        for name, variant in trained.items():
            peak = allocated_peak(variant.step, load.device)
            seen[name].peak_nbytes = peak + variant.held_nbytes
    return {name: vars(found) for name, found in seen.items()}


def _rounds(trained: dict[str, Training], seen: dict[str, Seen], indices: range) -> None:
    """Step all variants in turn, each round beginning with another; what is below 0 warms up."""
    from transfers import exposed_s, link

    gc.collect()
    gc.disable()
    for index in indices:
        names = list(trained)
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            link.take()
            begin = time.perf_counter()
            loss = trained[name].step()
            seconds, transfers = time.perf_counter() - begin, link.take()
            seen[name].losses.append(loss)
            if index >= 0:
                ours = [t for t in transfers if t.kind != "other"]
                seen[name].step_s.append(seconds)
                seen[name].exposed_s.append(exposed_s(ours))
                seen[name].launches = dict(Counter(t.kind for t in ours))
        gc.collect()
    gc.enable()


def show(found: dict[str, Any]) -> None:
    """Print a table."""
    floor = statistics.median(found["floor"]["step_s"]) if "floor" in found else None
    names = ("step s", "over floor", "exposed ms", "peak MiB", "first step s", "last loss")
    print("| variant | " + " | ".join((*names, "launches")) + " |")
    for name, cell in found.items():
        step = statistics.median(cell["step_s"])
        over = f"{step / floor:.3f}" if floor else ""
        exposed = statistics.median(cell["exposed_s"]) * 1e3
        print(
            f"| {name} | {step:.3f} | {over} | {exposed:.0f} | {cell['peak_nbytes'] / 2**20:.0f} | "
            f"{cell['compile_s']:.0f} | {cell['losses'][-1]:.5f} | {cell['launches']} |"
        )


def main() -> None:
    """Run, print, write."""
    import measure
    import torch
    import tyro
    from report import environment

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    options = tyro.cli(Options, description=__doc__, config=config)
    if options.row not in ROWS:
        raise SystemExit(f"--row: expected one of {', '.join(ROWS)}, got {options.row!r}")
    load = measure.on_the_wire(ROWS[options.row])
    found = measured(load, options.variants, options.rounds, options.warmup, measure.ONLY_ONE)
    show(found)
    path = options.json
    if path is None and options.variants == VARIANTS:
        path = RESULTS / f"whole_step_{options.row}.json"
    if path is not None:
        path.write_text(
            json.dumps({"environment": environment(torch.device("cpu")), "cells": found}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
