"""Which members of a bucket share a buffer."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import pytest

from inductor_passes.ir.program import Collective
from inductor_passes.machine.cluster import Cluster, Peak, Wire
from inductor_passes.machine.links import Link
from inductor_passes.machine.packing import members_to_pack

MB = 1 << 20


def cluster(**changes: float) -> Cluster:
    """Copies run at 1 MB per us, there and back; a member takes the wire 10 us, and compute 2."""
    kinds = ("gather", "reduce", "all_reduce")
    wires = tuple(Wire(kind, 8, 1, Link(50.0, 100.0, member_us=10.0)) for kind in kinds)
    known = Cluster(
        "made up", 8, {"bfloat16": Peak(100.0)}, 2 * MB / 1e3, 1.0, 3.0, 80.0, wires, "", 0.8
    )
    return replace(known, **changes)


def members(*nbytes: float, kind: str = "gather", dtype: str = "bfloat16") -> list[Collective]:
    return [
        Collective(kind, "dp", 8, int(size), dtype, "", (f"p{i}",)) for i, size in enumerate(nbytes)
    ]


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_small_members_share_a_buffer_if_they_pay_for_its_kernel(kind):
    def packed(*nbytes: float) -> tuple[int, ...]:
        return members_to_pack(members(*nbytes, kind=kind), cluster())

    assert packed(8, 8) == ()  # saves 2 us, and takes 3
    assert packed(8, 8, 8) == (0, 1, 2)
    assert packed(8, 50 * MB, 8, 50 * MB, 8) == (0, 2, 4)
    assert packed(8, 1.9 * MB, 8, 2.1 * MB, 8) == (0, 1, 2, 4)
    assert packed(*[50 * MB] * 20) == ()
    assert packed(8) == ()


def test_nothing_is_packed_where_it_costs_compute_nothing():
    many = members(*[8] * 50)
    assert len(members_to_pack(many, cluster())) == 50
    assert members_to_pack(many, cluster(compute_beside=1.0)) == ()
    wires = tuple(replace(wire, link=Link(50.0, 100.0)) for wire in cluster().wires)
    assert members_to_pack(many, replace(cluster(), wires=wires)) == ()


def test_what_is_not_ours_or_not_alike_is_not_packed():
    assert members_to_pack(members(*[8] * 50, kind="other"), cluster()) == ()
    mixed = [*members(*[8] * 50), *members(8, dtype="float32")]
    assert members_to_pack(mixed, cluster()) == ()
    alone = [replace(c, ranks=1) for c in members(*[8] * 50)]
    assert members_to_pack(alone, cluster()) == ()


def taken_us(sent: list[Collective], packed: tuple[int, ...], known: Cluster) -> float:
    """From compute, by a bucket whose members ``packed`` share a buffer."""
    apart = len(sent) - max(0, len(packed) - 1)
    nbytes = sum(sent[i].nbytes for i in packed)
    copies = known.launch_us + nbytes / MB if packed else 0.0
    return copies + known.wires[0].link.member_us * (apart - 1) * (1 - known.compute_beside)


def test_no_other_members_would_take_less_from_compute():
    """So the planner, which knows of no shared buffer, never predicts too little."""
    drawn, known, chosen = random.Random(0), cluster(), 0
    for _ in range(200):
        sent = members(*(drawn.choice((8, 1e5, MB, 3 * MB)) for _ in range(drawn.randint(1, 7))))
        places = range(len(sent))
        others = chain.from_iterable(combinations(places, n) for n in (0, *range(2, len(sent) + 1)))
        found = members_to_pack(sent, known)
        chosen += bool(found)
        least = min(taken_us(sent, other, known) for other in others)
        assert taken_us(sent, found, known) == pytest.approx(least)
    assert 20 < chosen < 180
