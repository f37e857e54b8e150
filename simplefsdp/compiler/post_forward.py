"""``reshard_after_forward=n``: a rank keeps a part of each full parameter for backward.

A gather is traced as two (``gather.py``): one over all ranks that share the shards, and one over
the ``n`` ranks that have the parts. The joint graph's forward reads what the second gives; the part
is tagged to be saved, if backward wants it, and the second gather to be recomputed
(``recompute.py``). Once forward and
backward are apart, forward need not gather twice::

    shard ─ gather over all ─┬─ forward          part ─ gather over n ─ backward
                             └─ part, saved
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters._torch import is_wait
from simplefsdp.provenance import gathered_fqn, is_post_forward_part

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def gather_once(graph: Graph) -> None:
    """Have the forward in ``graph`` read what was gathered over all ranks; and a backward, of the
    parameters of which it has no part.

    Where forward and backward are one graph, the first gather of a part is the forward's, and a
    second one the backward's.
    """
    seen = set[Node]()
    for again in graph.find_nodes(op="call_function", target=_GATHER):
        part: Node = again.args[0]  # type: ignore[assignment]
        if part in seen or part.op != "call_function" or not is_post_forward_part(part):
            continue
        seen.add(part)
        narrowed = part.all_input_nodes[0]
        whole = narrowed.all_input_nodes[0]
        if not is_wait(whole):
            raise RuntimeError(
                f"{gathered_fqn(part)}: reshard_after_forward: expected a copied part of what was "
                f"gathered, found one of {whole}; wrap with reshard_after_forward=True"
            )
        for wait in list(again.users):
            wait.replace_all_uses_with(whole)
            graph.erase_node(wait)
        graph.erase_node(again)
        for node in (part, narrowed):
            if not node.users:
                graph.erase_node(node)
