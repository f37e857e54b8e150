"""Which executor compiles a graph whose user did not choose one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from inductor_passes.ir.buckets import layer_of
from simplefsdp import _torch
from simplefsdp.choices import Executor
from simplefsdp.compiler.options import Options
from simplefsdp.rank_logging import say

# With so many layers that are alike, or more, one is compiled for all. Steps of the rows of
# `benchmarks/step.py` then take 1.00 to 1.03 times as long (benchmarks/RESULTS.md, "By regions"),
# compiling takes 0.7 of the time with 12 layers, 0.45 with 32. Each region is one more call, so
# layers of microseconds lose more: 8 % of a step whose blocks are 64 wide. With less than 8 layers
# there is less to gain.
MANY_LAYERS = 8


def executor_of(
    options: Options, shapes: Mapping[str, Sequence[int]], device: torch.device
) -> Executor:
    """The executor for a graph: the user's choice, or one chosen by how many layers are alike.

    ``"auto"`` is ``"regions"`` on CPU only: on an H200 steps by regions took 2 to 11 % longer
    (benchmarks/RESULTS.md). Nor is it ``"regions"`` where something regards a graph as a whole: the
    user's own passes and wrappers of Inductor, and ``bucketing="none"``, by which layers would be
    cut at each gather.

    Args:
        options: the user's.
        shapes: of the full parameters that the graph gathers, by FQN: the same on all ranks.
        device: of the parameters.
    """
    if options.executor != "auto":
        return options.executor
    whole = options.bucketing == "none" or _torch.has_settings_for_whole_graphs()
    if device.type != "cpu" or whole or (alike := most_alike(shapes)) < MANY_LAYERS:
        return "inductor"
    say("%d layers are alike: one is compiled for all (options['executor'])", alike)
    return "regions"


def most_alike(shapes: Mapping[str, Sequence[int]]) -> int:
    """The largest number of layers whose parameters have the same names and shapes. Only layers
    with two or more matrices count: a single one is an embedding table, or a head."""
    held: defaultdict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for fqn, layer in layer_of(list(shapes)).items():
        held[layer].add((fqn.removeprefix(layer), tuple(shapes[fqn])))
    large = (
        frozenset(params)
        for params in held.values()
        if sum(len(shape) > 1 for _, shape in params) > 1
    )
    return max(Counter(large).values(), default=0)
