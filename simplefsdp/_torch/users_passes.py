"""Makes our passes run on Inductor's graphs after the user's own passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

GraphPass = Callable[[Graph], None]


def after_the_users(name: str, function: GraphPass, identity: Callable[[], str]) -> dict[str, Any]:
    """The Inductor setting ``name``, with ``function`` as a pass after the user's own. ``identity``
    gives what Inductor's caches key the pass on."""
    users = getattr(config, name)
    in_turn = users if isinstance(users, (list, tuple)) else [users] if users is not None else []

    class _Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
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
            function(graph)

        def uuid(self) -> Any:
            theirs = first.uuid() if isinstance(first, CustomGraphPass) else None
            # None: the user's pass has no key, so the cache is bypassed, as it would be without us.
            return None if theirs is None else (theirs, identity())

    return {name: _Both()}
