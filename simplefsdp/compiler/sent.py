"""What calls of a compiled graph gather from other ranks, noted for ``rank_sequence``.

Dynamo runs code that it compiled for one layer for other layers like it, too. So names come from
the parameters that a call is given, not from the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.fx import GraphModule

from simplefsdp import rank_sequence
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.frontend import loaded
from simplefsdp.frontend.gather_spec import spec_of
from simplefsdp.frontend.living import fqns_of


def noting_gathers(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for the compiled ``gm``, which notes what each call gathers. Ranks compare that
    some calls later."""
    place_of = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    # By process group: place among the inputs, and name in the graph, of each gather in order.
    gathered: dict[str, list[tuple[int, str]]] = {}
    for node in gathers_of(gm):
        spec, place = spec_of(node), place_of.get(node.args[0])  # type: ignore[arg-type]
        # By functional_call, what was computed may stand in the place of a parameter.
        if spec.shard_ranks > 1 and "kept" not in node.kwargs and place is not None:
            gathered.setdefault(spec.shard_group, []).append((place, spec.fqn))
    # By process group: names of the parameters of the last call, and what that call gathered.
    last = {group: ([""], rank_sequence.gathered(())) for group in gathered}

    def noting(compiled: Callable[..., Any]) -> Callable[..., Any]:
        # By process group: after how many loads which parameters were asked about. One code may
        # serve several models.
        asked: dict[str, tuple[int, ...]] = {}

        def call(*args: Any) -> Any:
            for group, fqns in gathered.items():
                params = [args[place] for place, _ in fqns]
                names = fqns_of([(args[place], fqn) for place, fqn in fqns])
                now_asked = (loaded.loads(), *map(id, params))
                given = [] if asked.get(group) == now_asked else loaded.taken_of(params)
                asked[group] = now_asked
                before, now = last[group]
                if names != before or any(given) or now.loaded:
                    now = rank_sequence.gathered(names, chain(*given))
                    last[group] = names, now
                rank_sequence.note(group, now)  # not ``last``, which another thread may have set
            return compiled(*args)

        return call if gathered else compiled

    return noting
