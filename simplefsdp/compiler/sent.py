"""What calls of a compiled graph gather from other ranks, noted for ``rank_sequence``.

Dynamo runs code that it made of one layer for others like it. So what is gathered is told by the
parameters that a call is given, not by the names in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from simplefsdp import rank_sequence
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.frontend.gather import spec_of
from simplefsdp.frontend.living import fqns_of


class _Sent:
    """What calls of a graph gather by one process group."""

    def __init__(self, group: str) -> None:
        self.group = group
        # Names in the graph, by places among its inputs, as they are gathered.
        self.fqns: list[tuple[int, str]] = []
        # Names of the parameters of the last call, and what that gathered.
        self.last = ([""], rank_sequence.gathered(()))

    def note(self, args: tuple[Any, ...]) -> None:
        """A call with ``args`` begins."""
        names = fqns_of([(args[place], fqn) for place, fqn in self.fqns])
        before, now = self.last
        if names != before:
            now = rank_sequence.gathered(names)
            self.last = names, now
        rank_sequence.note(self.group, now)


def noting_gathers(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes the compiled ``gm`` a function of which each call is compared with other ranks'
    calls, some calls later."""
    place_of = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    sent: dict[str, _Sent] = {}
    for node in gathers_of(gm):
        spec = spec_of(node)
        if spec.shard_ranks > 1 and "kept" not in node.kwargs:
            of = sent.setdefault(spec.shard_group, _Sent(spec.shard_group))
            of.fqns.append((place_of[node.args[0]], spec.fqn))  # type: ignore[index]

    def noting(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            for of in sent.values():
                of.note(args)
            return compiled(*args)

        return call if sent else compiled

    return noting
