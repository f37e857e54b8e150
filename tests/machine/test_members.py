"""What the members of a bucket cost that is launched as one and sent tensor by tensor."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from inductor_passes.ir.program import Bucket, Collective, Program
from inductor_passes.ir.text import parse, to_text
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cluster import Cluster, ClusterCost, Peak, Wire
from inductor_passes.machine.cluster_file import load, save
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.links import Link, between
from inductor_passes.machine.presets import PRESETS, preset
from inductor_passes.machine.simulate import simulate
from inductor_passes.transform.merge import in_one_piece, merge

LINK = Link(10.0, 1.0, member_us=4.0)
ROUND = Cluster(
    name="round",
    ranks_per_node=4,
    peaks={"float32": Peak(1.0)},
    memory_gb_s=1.0,
    memory_fraction=1.0,
    launch_us=0.0,
    memory_gb=1.0,
    wires=tuple(Wire(kind, 4, 1, LINK) for kind in ("gather", "reduce", "all_reduce")),
)
COST = ClusterCost(ROUND)


def three_gathers() -> Program:
    lines = []
    for name in "abc":
        lines += [
            f"resident {name}: 250",
            f"start g{name}({name}) -> f{name}: 1000 | gather group=dp ranks=4 nbytes=1000 "
            f"dtype=float32 fqns={name}",
            f"wait w{name}(f{name})",
        ]
    return parse("\n".join(lines))


ALL = Bucket("all", ("ga", "gb", "gc"))


def test_each_member_but_the_first_costs_so_much() -> None:
    assert LINK.us(1000, 4) == LINK.us(1000, 4, 1) == 11.0
    assert LINK.us(3000, 4, 3) == 10 + 2 * 4 + 3
    apart = three_gathers()
    together = merge(apart, [ALL])
    (start,) = (op for _, op in together.starts())
    assert start.collective is not None and start.collective.members == 3
    assert simulate(apart, COST).wire_us == 3 * 11.0
    assert simulate(together, COST).wire_us == 10 + 2 * 4 + 3


def test_one_buffer_has_one_member() -> None:
    flat = in_one_piece(merge(three_gathers(), [ALL]))
    assert simulate(flat, COST).wire_us == 13.0


def test_the_bound_prices_members_as_the_simulator_does() -> None:
    assert lower_bound_us(three_gathers(), COST) == 21.0
    assert simulate(merge(three_gathers(), [ALL]), COST).total_us == 21.0


@pytest.mark.parametrize("name", PRESETS)
def test_a_bucket_never_costs_more_than_its_parts(name: str) -> None:
    rng = random.Random(0)
    for ranks, nodes in [(2, 1), (8, 1), (16, 2), (24, 3), (512, 64)]:
        link = preset(name).link("gather", ranks, nodes)
        for _ in range(200):
            (one, n), (two, m) = ((2 ** rng.uniform(0, 33), rng.randint(1, 9)) for _ in range(2))
            apart = link.us(one, ranks, n) + link.us(two, ranks, m)
            assert link.us(one + two, ranks, n + m) <= apart * (1 + 1e-9)


def test_a_member_that_costs_more_than_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"member_us: expected no more than latency_us, 10.0, got"):
        replace(LINK, member_us=11.0)
    with pytest.raises(ValueError, match="member_us: expected a finite number of 0 or more"):
        replace(LINK, member_us=-1.0)


def test_the_simple_cost_model_has_them_too() -> None:
    cost = LinearCost(latency_us=10, link_gb_s=1.0, member_us=4)
    together = merge(three_gathers(), [ALL])
    assert simulate(together, cost).wire_us == 21.0
    assert simulate(together, cost.with_flat_buckets()).wire_us == 13.0
    with pytest.raises(ValueError, match="member_us: expected 0 to latency_us, 3, got 4"):
        replace(cost, latency_us=3)


def test_between_known_groups_a_member_costs_the_same_part_of_the_latency() -> None:
    points = [(2.0, Link(10.0, 4.0, member_us=2.0)), (8.0, Link(40.0, 4.0, member_us=4.0))]
    assert between(points, 3.9).member_us == pytest.approx(0.2 * between(points, 3.9).latency_us)
    assert between(points, 4.1).member_us == pytest.approx(0.1 * between(points, 4.1).latency_us)
    none = [(2.0, Link(0.0, 4.0)), (8.0, Link(0.0, 4.0))]
    assert between(none, 4.0).member_us == 0


def test_on_gpus_a_member_costs_a_part_of_the_rings_latency() -> None:
    for kind in ("gather", "reduce"):
        link = preset("h100").link(kind, 512, 64)
        assert 0 < link.member_us == pytest.approx(0.2 * link.latency_us)
    assert preset("cpu-gloo").link("gather", 2, 1).member_us == 0


def test_a_file_from_before_has_members_that_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    save(path, ROUND)
    assert load(path) == ROUND
    data = json.loads(path.read_text())
    for wire in data["wires"]:
        assert wire["link"].pop("member_us") == 4.0
    path.write_text(json.dumps(data))
    assert load(path) == ROUND.with_flat_buckets()


def test_a_number_of_members_is_written_and_read() -> None:
    text = to_text(merge(three_gathers(), [ALL]))
    assert "bucket=all members=3 fqns=a, b, c" in text
    assert to_text(parse(text)) == text
    assert Collective("gather", "dp", 4, 8, "float32").members == 1
