"""How a joint graph is cut into forward and backward, with our changes before and after the cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._logging import _internal
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module


class Cut(NamedTuple):
    """What to do to a joint graph before and after it is cut into forward and backward."""

    before: Callable[[Graph], None]  # mutates the joint graph before anything else does
    # Makes new graphs from the forward graph, the backward graph, and the number of the forward's
    # outputs that are not saved for backward.
    after: Callable[[GraphModule, GraphModule, int], tuple[GraphModule, GraphModule]]
    # ``before`` may remove inputs of the joint graph: the original indices of those that are left.
    kept: Callable[[], Sequence[int]]


def can_cut() -> bool:
    """Whether a :class:`Cut` is possible: no setting of the user's needs the whole joint graph."""
    if functorch_config.joint_custom_pass is not None:
        return False
    if functorch_config.activation_memory_budget != 1:  # a share of all layers' activations
        return False
    users = config.joint_custom_pre_pass, config.joint_custom_post_pass
    return all(of_user in (None, []) for of_user in (*users, config.custom_partitioner_fn))


def partitioner(cut: Cut, identity: Callable[[], str]) -> dict[str, Any]:
    """The setting that makes Inductor partition by :func:`cut_in_two`; its caches can key on it."""

    class _Partitioner(CustomPartitionerFn):
        def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return cut_in_two(cut, gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return identity()

        def __reduce__(self) -> tuple[Any, ...]:
            # The key of the FX-graph cache is a pickle of the settings, this object among them.
            return str, (identity(),)

    return {"custom_partitioner_fn": _Partitioner()}


def graph_module(root: GraphModule, graph: Graph) -> GraphModule:
    """A module of ``graph``, with the attributes of ``root``. Its Python code is generated only if
    the module is run: for a deep graph that takes a second."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def copied(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy of ``gm`` whose graph can be changed, and the copy of each node."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    return graph_module(gm, graph), copies


def cut_in_two(cut: Cut, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """Partition ``joint`` by torch's min-cut partitioner, then change the two graphs as ``cut``
    says. The arguments are those of the partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    static = kwargs.pop("static_lifetime_input_indices", None)
    if static is not None:
        known = set(static)
        static = [i for i, place in enumerate(cut.kept()) if place in known]
    forward, backward = min_cut_rematerialization_partition(
        joint, joint_inputs, static_lifetime_input_indices=static, **kwargs
    )
    found = cut.after(forward, backward, kwargs["num_fwd_outputs"])
    for gm in found:
        _print_where_wanted(gm)
    return found


def _print_where_wanted(gm: GraphModule) -> None:
    """Give AOTAutograd an empty text of ``gm`` unless it is logged: AOTAutograd always asks for the
    text, which takes a second for a deep graph."""
    log = _internal.getArtifactLogger("torch._functorch._aot_autograd.graph_compile", "aot_graphs")
    if not _internal.trace_log.handlers and not log.isEnabledFor(logging.INFO):
        gm.print_readable = _no_text  # type: ignore[method-assign,assignment]


def _no_text(*_: object, **__: object) -> str:
    """An empty text. This is no lambda, because the keys of Inductor's cache pickle graphs."""
    return ""
