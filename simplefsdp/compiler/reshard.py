"""``reshard_after_forward="auto"``: decide which full parameters stay from forward to backward.

Runs on the Dynamo graph, whose gathers it gives a definite ``reshard_after_forward``; what follows
need not know that there was a choice. To see what a choice is worth, forward and backward are
traced once more, as if nothing were kept; and, on several machines, as if of each parameter a part
were kept, which backward gathers within a machine (``post_forward.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.adapters.scalars import reduce_at_once
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.planner.keep import Costed, Kept, choose_kept
from inductor_passes.rehearsal import Settings, room_nbytes
from simplefsdp import _torch, provenance
from simplefsdp.compiler.dedupe import gathers_of, specs_of
from simplefsdp.compiler.post_forward import gather_once
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.frontend.gather_spec import NO_PARTS, GatherSpec, spec_of
from simplefsdp.rank_guard import TIMEOUT_S, decided, decisions
from simplefsdp.rank_logging import say

log = logging.getLogger("simplefsdp")


def decide_resharding(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings | None,
    ranks: Sequence[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Replace every ``"auto"`` among the gathers of ``gm``, in place; log what is kept.

    An earlier decision for the same gathers stands: a choice depends on the batch, and one rank
    alone may compile again for another batch. On several ranks the lowest decides.
    """
    specs = specs_of(gm)
    open_ = {spec.fqn: spec for spec in specs if spec.reshard_after_forward == "auto"}
    if not open_:
        return
    if settings is None or settings.auto is None:
        first = next(iter(open_))
        raise ValueError(
            f"{first}: simple_fsdp(reshard_after_forward='auto') leaves it to the planner of "
            "bucketing='auto' what is kept; choose that, or wrap with True or False"
        )
    _set(gm, open_, Kept())
    if not torch.is_grad_enabled():
        return
    known, key = decisions(), ("kept", tuple(ranks), repr(settings), tuple(specs))
    if key not in known:
        # Made of what is equal on all ranks: the settings, and of the gathers their names.
        subject = [hashlib.sha256(repr(settings).encode()).hexdigest(), *(s.fqn for s in specs)]

        def decide() -> str:
            try:
                chosen = _choose(gm, example_inputs, settings, open_)
            except Exception as error:
                # The compilation that follows meets it too, and tells the other ranks.
                log.warning("reshard_after_forward='auto': nothing is kept from forward: %s", error)
                chosen = Kept()
            return json.dumps([sorted(chosen.fqns), chosen.way])

        what = "which parameters stay from forward to backward"
        fqns, way = json.loads(decided(what, subject, ranks, decide, timeout_s))
        known[key] = Kept(frozenset(fqns), way)
    _set(gm, open_, known[key])
    _tell(open_, known[key])


def _tell(open_: Mapping[str, GatherSpec], kept: Kept) -> None:
    if kept.fqns:
        say("kept from forward to backward: %s", ", ".join(f for f in open_ if f in kept.fqns))
    if kept.way == _PARTS:
        say("of the others, parts are kept, gathered from %d neighbours", _neighbours(open_))


# The ways to gather again: from all ranks, and from those of one machine, to whom parts are left.
_SHARDS, _PARTS = 0, 1


def _neighbours(open_: Mapping[str, GatherSpec]) -> int:
    return max(spec.post_forward_ranks for spec in open_.values())


def _set(gm: GraphModule, open_: Mapping[str, GatherSpec], kept: Kept) -> None:
    """Have the gathers of ``open_`` done as ``kept`` says."""
    parts: Mapping[str, Any] = {} if kept.way == _PARTS else NO_PARTS
    for node in gathers_of(gm):
        fqn = spec_of(node).fqn
        if fqn in open_:
            spec = open_[fqn]._replace(**parts, reshard_after_forward=fqn not in kept.fqns)
            node.args = (node.args[0], *spec.arguments())
    gm.recompile()


@no_garbage_collection()
def _choose(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    open_: Mapping[str, GatherSpec],
) -> Kept:
    if settings.auto is None:
        return Kept()
    ways = [_SHARDS] if _neighbours(open_) == 1 else [_SHARDS, _PARTS]
    steps, room = [], []
    for way in ways:
        traced = _torch.copied(gm)[0]
        _set(traced, open_, Kept(way=way))
        graphs = _torch.graphs_of(traced, example_inputs, tag_for_recompute)
        if len(graphs) < 2:
            return Kept()
        readings = [_read(graphs[part].graph) for part in (False, True)]
        cluster = settings.auto.cluster
        forward, backward = (Costed(fused_program(r), cost_of(r, cluster)) for r in readings)
        steps.append((forward, backward))
        room += [room_nbytes(r.program, cluster) for r in readings]
    return choose_kept(
        steps,
        settings.assignment,
        list(open_),
        budget_nbytes=settings.auto.budget_nbytes,
        device_nbytes=min(room),
    )


def _read(graph: Graph) -> fx.Reading:
    gather_once(graph)
    write_sums_unrounded(graph)
    reduce_at_once(graph, provenance.carried_fqn)
    return fx.read(graph, provenance.carried_fqn)
