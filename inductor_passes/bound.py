"""How short a step could be at best."""

from __future__ import annotations

from inductor_passes.chain import Chain, Side


def lower_bound_us(chain: Chain) -> float:
    """Microseconds that no bucketing, order or window of ``chain`` can go below.

    Compute, plus the part of the first gather that nothing can hide and that of the last reduce;
    for each place in the chain, all gathers due until there, merged, and the compute after it; for
    each, the compute before it and all reduces that are ready from there on; the whole of each
    lane. It holds if merging never costs more and a larger transfer never less, as of any latency
    plus bytes over bandwidth.
    """
    total = sum(e.work_us - e.others_us for e in chain.events)
    wires: dict[str, float] = {}
    before = 0.0
    due: list[float] = []  # compute before each gather unit
    ready: list[float] = []
    for event in chain.events:
        if event.kind == "gather":
            due.append(before)
        elif event.kind == "reduce":
            ready.append(before)
        before += event.work_us - event.others_us
    first = max(0.0, _wire(chain, "gather", 0, 1) - due[0]) if due else 0.0
    bound = first + total
    gathered, reduced = len(chain.gathers), len(chain.reduces)
    for k in range(gathered):
        bound = max(bound, _wire(chain, "gather", 0, k + 1) + total - due[k])
    for k in range(reduced):
        bound = max(bound, first + ready[k] + _wire(chain, "reduce", k, reduced))
    gathers = chain.transfers("gather", 0, gathered)
    reduces = chain.transfers("reduce", 0, reduced)
    for group, us in (*gathers, *reduces):
        wires[group] = wires.get(group, 0.0) + us
    return max(bound, *wires.values(), 0.0)


def _wire(chain: Chain, kind: Side, begin: int, end: int) -> float:
    """What the units cost merged, on the lane that has most of it."""
    lanes: dict[str, float] = {}
    for group, us in chain.transfers(kind, begin, end):
        lanes[group] = lanes.get(group, 0.0) + us
    return max(lanes.values(), default=0.0)
