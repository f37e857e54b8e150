"""``reshard_after_forward="auto"``: decide which full parameters stay from forward to backward.

Runs on the Dynamo graph, whose gathers it gives a definite ``reshard_after_forward``; what follows
need not know that there was a choice. To see what a choice is worth, forward and backward are
traced once more, as if nothing were kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.adapters.scalars import reduce_at_once
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.planner.keep import Costed, choose_kept
from inductor_passes.rehearsal import Settings, room_nbytes
from simplefsdp import _torch, provenance
from simplefsdp.compiler.dedupe import gathers_of, specs_of
from simplefsdp.compiler.post_forward import gather_once
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.frontend.gather_spec import spec_of
from simplefsdp.rank_guard import TIMEOUT_S, decided, decisions

log = logging.getLogger("simplefsdp")


def decide_resharding(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings | None,
    ranks: Sequence[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[str]:
    """Replace every ``"auto"`` among the gathers of ``gm``, in place; gives the parameters to be
    kept from forward to backward.

    An earlier decision for the same gathers stands: a choice depends on the batch, and one rank
    alone may compile again for another batch. On several ranks the lowest decides.
    """
    specs = specs_of(gm)
    open_ = [spec.fqn for spec in specs if spec.reshard_after_forward == "auto"]
    if not open_:
        return []
    if settings is None or settings.auto is None:
        raise ValueError(
            f"{open_[0]}: simple_fsdp(reshard_after_forward='auto') leaves it to the planner of "
            "bucketing='auto' what is kept; choose that, or wrap with True or False"
        )
    _set(gm, open_, kept=())
    if not torch.is_grad_enabled():
        return []
    known, key = decisions(), ("kept", tuple(ranks), repr(settings), tuple(specs))
    if key not in known:
        # Made of what is equal on all ranks: the settings, and of the gathers their names.
        subject = [hashlib.sha256(repr(settings).encode()).hexdigest(), *(s.fqn for s in specs)]

        def decide() -> str:
            try:
                chosen = _choose(_torch.copied(gm)[0], example_inputs, settings, open_)
            except Exception as error:
                # The compilation that follows meets it too, and tells the other ranks.
                log.warning("reshard_after_forward='auto': nothing is kept from forward: %s", error)
                chosen = frozenset()
            return json.dumps(sorted(chosen))

        what = "which parameters stay from forward to backward"
        known[key] = json.loads(decided(what, subject, ranks, decide, timeout_s))
    kept = [fqn for fqn in open_ if fqn in known[key]]
    _set(gm, open_, kept=kept)
    return kept


def _set(gm: GraphModule, fqns: Collection[str], kept: Collection[str]) -> None:
    for node in gathers_of(gm):
        spec = spec_of(node)
        if spec.fqn in fqns:
            spec = spec._replace(reshard_after_forward=spec.fqn not in kept)
            node.args = (node.args[0], *spec.arguments())
    gm.recompile()


@no_garbage_collection()
def _choose(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, candidates: Sequence[str]
) -> frozenset[str]:
    graphs = _torch.graphs_of(gm, example_inputs, tag_for_recompute)
    if len(graphs) < 2 or settings.auto is None:
        return frozenset()
    for graph in graphs.values():
        gather_once(graph.graph)
        write_sums_unrounded(graph.graph)
        reduce_at_once(graph.graph, provenance.carried_fqn)
    cluster = settings.auto.cluster
    readings = [fx.read(graphs[part].graph, provenance.carried_fqn) for part in (False, True)]
    forward, backward = (Costed(fused_program(r), cost_of(r, cluster)) for r in readings)
    return choose_kept(
        forward,
        backward,
        settings.assignment,
        candidates,
        budget_nbytes=settings.auto.budget_nbytes,
        device_nbytes=min(room_nbytes(r.program, cluster) for r in readings),
    )
