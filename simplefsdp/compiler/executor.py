"""Which executor compiles a graph whose user did not choose one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from inductor_passes.ir.buckets import repeated_modules
from simplefsdp.choices import Executor
from simplefsdp.compiler.options import Options

# Layers that are alike, from which on one is compiled for all. As fast as the whole graph, to 2 %
# (benchmarks/RESULTS.md, "By regions"), but with 8 layers compiled in less than two thirds of the
# time, and with 32 in a third. With fewer there is less to gain.
MANY_LAYERS = 8


def executor_of(options: Options, shapes: Mapping[str, Sequence[int]]) -> Executor:
    """The executor for a graph: what the user chose, or the one for as many layers as are alike.

    Args:
        options: the user's.
        shapes: of the full parameters that the graph gathers, by FQN.
    """
    if options.executor != "auto":
        return options.executor
    many = most_alike(shapes) >= MANY_LAYERS
    return "regions" if many and not options.cudagraphs else "inductor"


def most_alike(shapes: Mapping[str, Sequence[int]]) -> int:
    """How many of a model's layers have parameters of the same names and shapes."""
    layers = frozenset(repeated_modules(list(shapes)))
    held: defaultdict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for fqn, shape in shapes.items():
        names = fqn.split(".")
        for i in range(1, len(names)):
            if (layer := ".".join(names[:i])) in layers:
                held[layer].add((".".join(names[i:]), tuple(shape)))
    return max(Counter(map(frozenset, held.values())).values(), default=0)
