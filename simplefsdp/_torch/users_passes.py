"""Makes our passes run on Inductor's graphs after the user's own passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

GraphPass = Callable[[Graph], None]


def after_the_users(name: str, function: GraphPass, identity: Callable[[], str]) -> dict[str, Any]:
    """The Inductor setting ``name``, with ``function`` as a pass after the user's own. ``identity``
    gives what Inductor's caches key the pass on."""
    users = getattr(config, name)
    in_turn = users if isinstance(users, (list, tuple)) else [users] if users is not None else []
    # Torch sorts the graph after the last pass, so passes before ours need not leave it in order.
    may_be_unsorted = bool(in_turn or config.post_grad_fusion_options)

    class _Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            if may_be_unsorted:
                stable_topological_sort(graph)
            function(graph)

        def uuid(self) -> Any:
            return identity()

    if not in_turn:
        return {name: _Pass()}
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # since 2.13
        return {name: [*in_turn, _Pass()]}
    (first,) = in_turn

    class _Both(_Pass):
        def __call__(self, graph: Graph) -> None:
            first(graph)
            super().__call__(graph)

        def uuid(self) -> Any:
            theirs = first.uuid() if isinstance(first, CustomGraphPass) else None
            # None: the user's pass has no key, so the cache is bypassed, as it would be without us.
            return None if theirs is None else (theirs, identity())

    return {name: _Both()}
