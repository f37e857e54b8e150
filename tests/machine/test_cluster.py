"""Clusters: what transfers and kernels cost, what is refused, and files that round-trip."""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from programs import GROUPS, random_program

from inductor_passes.ir.program import Collective
from inductor_passes.machine import cluster as cluster_module
from inductor_passes.machine.cluster import Cluster, ClusterCost, Peak, Wire, Work, nodes_spanned
from inductor_passes.machine.cluster_file import as_cluster, load, save
from inductor_passes.machine.links import Link, fraction
from inductor_passes.machine.presets import PRESETS, preset
from inductor_passes.machine.simulate import simulate

# Easy to add up by hand: 1 TFLOP/s, 1 GB/s of memory, links of 10 us and 1 GB/s.
ROUND = Cluster(
    name="round",
    ranks_per_node=4,
    peaks={"float32": Peak(1.0, matmul=((1e6, 0.5), (1e8, 1.0)), attention=((1.0, 0.25),))},
    memory_gb_s=2.0,
    memory_fraction=0.5,
    launch_us=3.0,
    memory_gb=1.0,
    wires=tuple(
        Wire(kind, ranks, nodes, Link(latency, gb_s))
        for kind in ("gather", "reduce", "all_reduce")
        for ranks, nodes, latency, gb_s in [
            (2, 1, 10.0, 4.0),
            (4, 1, 20.0, 1.0),
            (8, 2, 40.0, 2.0),
            (16, 4, 80.0, 2.0),
        ]
    ),
)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 16])
@pytest.mark.parametrize("name", ["h100", "cpu-gloo"])
def test_nodes_of_another_size_have_the_same_links(name: str, per_node: int) -> None:
    """Of which each device has a part of its own, so that a group costs what it did; but nodes
    larger than those known send no faster than these."""
    known = preset(name)
    other = known.with_nodes_of(per_node)
    assert other.ranks_per_node == per_node
    assert other.with_nodes_of(per_node) == other
    for kind in ("gather", "reduce", "all_reduce"):
        for ranks in range(2, per_node + 1):
            was, now = known.link(kind, ranks, 1), other.link(kind, ranks, 1)
            assert now.latency_us == pytest.approx(was.latency_us)
            assert now.gb_s == pytest.approx(was.gb_s)
        for nodes in (2, 4, 32):
            ranks = nodes * per_node
            as_known = known.link(kind, nodes * min(per_node, known.ranks_per_node), nodes)
            assert other.link(kind, ranks, nodes) == as_known
    back = known.with_nodes_of(known.ranks_per_node)
    assert sorted(back.wires, key=repr) == sorted(known.wires, key=repr)


def sizes() -> list[int]:
    return sorted({int(2**e * f) for e in range(2, 34) for f in (1, 1.1, 1.5)})


@pytest.mark.parametrize("name", PRESETS)
def test_more_bytes_never_take_less_and_two_transfers_never_take_less_than_one(name: str) -> None:
    rng = random.Random(0)
    groups = [(2, 1), (3, 1), (8, 1), (16, 2), (24, 3), (4, 4), (512, 64)]
    for kind in ("gather", "reduce", "all_reduce", "other"):
        for ranks, nodes in groups:
            link = preset(name).link(kind, ranks, nodes)
            times = [link.us(nbytes, ranks) for nbytes in sizes()]
            assert times == sorted(times)
            for _ in range(200):
                one, two = (2 ** rng.uniform(0, 33) for _ in range(2))
                together = link.us(one + two, ranks)
                assert together <= (link.us(one, ranks) + link.us(two, ranks)) * (1 + 1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_larger_groups_never_cost_less(name: str) -> None:
    for kind in ("gather", "reduce", "all_reduce"):
        within = [preset(name).link(kind, r, 1).us(2**26, 8) for r in range(2, 9)]
        across = [preset(name).link(kind, 8 * n, n).us(2**26, 8) for n in range(2, 129)]
        assert within == sorted(within)
        assert across == sorted(across)


def test_known_groups_cost_what_the_table_says() -> None:
    assert ROUND.link("gather", 4, 1).us(1000, 4) == 21.0
    assert ROUND.link("reduce", 8, 2).us(1000, 8) == 40.5
    assert preset("h100").link("gather", 8, 1) == Link(30.0, 394.0, member_us=6.0)
    assert preset("h100").link("gather", 64, 8).us(2**30, 64) == pytest.approx(
        297 + 2**30 / (390e3 * 0.79)  # 16 MiB per rank
    )


def test_groups_between_and_beyond_the_known_follow_the_power_law() -> None:
    between = ROUND.link("gather", 3, 1)
    assert between.latency_us == pytest.approx(10 * 2 ** math.log2(1.5))
    assert between.gb_s == pytest.approx(4 * 4 ** -math.log2(1.5))
    beyond = ROUND.link("gather", 32, 8)
    assert (beyond.latency_us, beyond.gb_s) == (pytest.approx(160.0), 2.0)


def test_across_nodes_each_rank_brings_its_own_card() -> None:
    assert ROUND.link("gather", 2, 2).gb_s == 0.5  # one of four ranks per node
    assert ROUND.link("gather", 4, 2).gb_s == 1.0


@pytest.mark.parametrize(
    ("name", "tflops"), [("a100", (180, 230)), ("h100", (499, 595)), ("b200", (1000, 1250))]
)
def test_attention_takes_what_torchs_default_takes(name: str, tflops: tuple[int, int]) -> None:
    """cuDNN's, between its measured backward and forward (arXiv 2407.08608), where torch prefers
    it: an H100 with FlashAttention 2 would have 310 to 370."""
    flops = 1e13
    us = preset(name).compute_us(Work(flops, kind="attention", dtype="bfloat16"))
    assert tflops[0] < flops / us / 1e6 < tflops[1]


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_what_is_sent_slows_what_is_computed_on_gpus(name: str) -> None:
    """NCCL has 16 to 24 blocks, each on one of 108 to 148 SMs."""
    assert 1 - 24 / 108 < preset(name).compute_beside < 1 - 16 / 148


def test_a_group_of_one_only_copies() -> None:
    assert ROUND.link("gather", 1, 1) == Link(3.0, 0.5)


def test_others_cost_as_much_as_an_all_reduce() -> None:
    h100 = preset("h100")
    assert h100.link("other", 8, 1) == h100.link("all_reduce", 8, 1)


def test_a_group_that_nothing_is_known_of_is_an_error() -> None:
    measured = replace(ROUND, wires=tuple(w for w in ROUND.wires if w.ranks == 2))
    assert measured.link("gather", 2, 1).gb_s == 4.0
    with pytest.raises(ValueError, match=r"gather among 4 ranks on 1 node costs: it knows 2 ranks"):
        measured.link("gather", 4, 1)
    with pytest.raises(ValueError, match=r"`simplefsdp calibrate` with 8 ranks"):
        measured.link("reduce", 8, 2)


def test_far_extrapolation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster_module._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        for _ in range(2):
            ROUND.link("gather", 64, 16)
    assert [r.message for r in caplog.records] == [
        "cluster 'round': gather on 16 nodes is extrapolated from 4"
    ]


def test_a_ramp_is_log_log_between_its_points_and_level_beyond() -> None:
    ramp = ((10.0, 0.1), (1000.0, 0.4))
    assert fraction(ramp, 1) == 0.1
    assert fraction(ramp, 100) == pytest.approx(0.2)
    assert fraction(ramp, 1e9) == 0.4
    assert fraction((), 5) == 1.0


@pytest.mark.parametrize(
    ("work", "us"),
    [
        (Work(nbytes=1000), 1 + 3),
        (Work(nbytes=1000, kernels=0), 1),
        (Work(kind="view", kernels=0), 0),
        (Work(1e8, 1000, "matmul"), 100 + 3),
        (Work(1e7, 1000, "matmul"), 10 / math.sqrt(0.5) + 3),
        (Work(1e6, 1e6, "matmul"), 1000 + 3),
        (Work(1e6, 1000, "attention"), 4 + 3),
    ],
)
def test_compute_is_the_longer_of_arithmetic_and_memory_and_the_launch(
    work: Work, us: float
) -> None:
    assert ROUND.compute_us(work) == pytest.approx(us)


def test_a_dtype_without_a_peak_counts_as_the_slowest_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster_module._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        assert preset("a100").peak("complex64") == preset("a100").peak("float32")
    assert "'a100' has no peak for complex64; counted as float32" in caplog.text


def test_the_cost_model_prices_programs() -> None:
    cost = ClusterCost(ROUND, {"dp": 1, "rep": 2, "tp": 2})
    collectives = [
        Collective("gather", group, ranks, 1000, "f32") for group, ranks in GROUPS.items()
    ]
    assert [cost.collective_us(c) for c in collectives] == [21.0, 42.0, 40.5]
    assert ClusterCost(ROUND).collective_us(collectives[1]) == 10.25  # two ranks share a node
    for seed in range(20):
        program = random_program(seed, 40)
        timeline = simulate(program, cost)
        op = next(op for op in program.ops if op.kind == "compute")
        assert ClusterCost(ROUND, work={op.name: Work(nbytes=7000)}).compute_us(program, op) == 10
        assert max(timeline.wire_us, timeline.compute_us) > 0
        assert timeline.total_us >= timeline.compute_us


@pytest.mark.parametrize(
    ("members", "world_size", "per_node", "nodes"),
    [
        (range(8), 8, 8, 1),
        (range(64), 64, 8, 8),
        (range(8, 16), 64, 8, 1),
        (range(3, 64, 8), 64, 8, 8),  # one rank per node
        (range(0, 4, 2), 8, 4, 1),
        ([0, 1, 2], 12, 8, 1 + 1),  # of its siblings, 6 to 8 sit on two nodes
        ([6, 7, 8], 12, 8, 2),
        ([0, 1, 4, 5], 8, 2, 4),  # no stride: as many as there could be
        ([5], 8, 2, 1),
    ],
)
def test_nodes_of_a_group_are_the_same_on_all_ranks(
    members: list[int], world_size: int, per_node: int, nodes: int
) -> None:
    assert nodes_spanned(list(members), world_size, per_node) == nodes


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    save(path, preset(name))
    assert load(path) == preset(name)
    assert as_cluster(str(path)) == as_cluster(path) == as_cluster(preset(name)) == as_cluster(name)
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


def test_what_is_no_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no preset 'h900'.*cpu-gloo, a100, a100-40gb, h100, h200, b200.*JSON"
    ):
        as_cluster("h900")
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        as_cluster("nowhere.json")
    with pytest.raises(TypeError, match="got int"):
        as_cluster(8)  # type: ignore[arg-type]
    path = tmp_path / "torn.json"
    for text in ("", "{", "[]", "{}", "null"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"torn\.json: .*simplefsdp calibrate"):
            load(path)


def change(data: dict, path: str, value: object) -> None:
    *keys, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    for key in keys:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("version", 2, "expected version 1, got 2"),
        ("launch_us", None, "launch_us is missing"),
        ("speed", 3, "unknown key 'speed'"),
        ("memory_gb_s", -1.0, "memory_gb_s: expected a finite number above 0, got -1.0"),
        ("memory_gb", 0, "memory_gb: expected a finite number above 0, got 0"),
        ("launch_us", math.nan, "launch_us: expected a finite number of 0 or more, got nan"),
        ("memory_fraction", 1.5, "memory_fraction is above 1"),
        ("compute_beside", 1.5, "compute_beside is above 1"),
        ("compute_beside", 0.0, "compute_beside"),
        ("ranks_per_node", "8", "ranks_per_node: expected a whole number of 1 or more, got '8'"),
        ("ranks_per_node", 0.5, "ranks_per_node: expected a whole number of 1 or more, got 0.5"),
        ("ranks_per_node", 1, "ranks_per_node is 1, but it has a gather among 2 ranks on 1 node"),
        ("peaks", {}, "it has no peaks"),
        ("peaks", [], "peaks: expected an object"),
        ("wires", [], "it has no wires"),
        ("wires", 3, "wires: expected a list"),
        ("peaks.float32.tflops", 0.0, "peaks.float32: tflops: expected a finite number above 0"),
        ("peaks.float32.matmul", 2, "peaks.float32: matmul: expected a list"),
        ("peaks.float32.matmul", [[1, 2, 3]], "peaks.float32: matmul: expected points"),
        ("peaks.float32.matmul", [[1, 2]], "the fraction at 1 is above 1"),
        (
            "peaks.float32.matmul",
            [[1, 0.1], [2, 0.9]],
            "rises from 0.1 to 0.9, by more",
        ),
        ("wires.0.kind", "broadcast", r"wires\[0\]: kind: expected one of gather"),
        ("wires.0.ranks", 1, r"wires\[0\]: ranks: 1 ranks cannot communicate"),
        ("wires.1.nodes", 0, r"wires\[1\]: nodes: expected a whole number of 1 or more, got 0"),
        ("wires.2.link", None, r"wires\[2\]: link is missing"),
        ("wires.2.link.gb_s", None, r"wires\[2\]\.link: gb_s is missing"),
        ("wires.2.link.gb_s", math.inf, r"wires\[2\]\.link: gb_s: .* got inf"),
        ("wires.2.link.latency_us", -2, r"wires\[2\]\.link: latency_us: .* got -2"),
        ("wires.2.link.latency_us", True, r"wires\[2\]\.link: latency_us: .* got True"),
        ("wires.2.link.ramp", [[2, 0.5], [1, 0.6]], "sizes must rise"),
        ("wires.2.link.ramp", [[1, 0.5], [2, 0.4]], "from 1 to 2 the fraction falls to 0.4"),
    ],
)
def test_a_wrong_figure_is_named(where: str, value: object, named: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    save(path, ROUND)
    data = json.loads(path.read_text())
    change(data, where, value)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"edited\.json: .*{named}"):
        load(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        save(path, replace(ROUND, source=object()))  # type: ignore[arg-type]
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


@pytest.mark.parametrize(
    ("members", "nodes"),
    [([0, 5], 2), ([0, 3], 2), ([2, 3, 4, 5], 2), ([0, 1, 2, 3], 1), ([0, 4], 2), ([5], 1)],
)
def test_groups_of_any_shape_span_some_nodes(members, nodes):
    assert nodes_spanned(members, world_size=8, ranks_per_node=4) == nodes


def test_presets_attend_with_the_kernel_that_torch_prefers() -> None:
    """1e12 operations per second of large attention, forward and backward together."""
    many = Work(flops=1e13, kind="attention", dtype="bfloat16")
    tflops = {name: 1e7 / (preset(name).compute_us(many) - 3) for name in ("a100", "h100", "b200")}
    # FlashAttention 2; cuDNN, measured; cuDNN, estimated.
    assert tflops == pytest.approx({"a100": 187, "h100": 526, "b200": 1080}, rel=0.01)


def test_compute_slows_beside_nccl() -> None:
    beside = {name: cluster.compute_beside for name, cluster in PRESETS.items()}
    gpus = ("a100", "a100-40gb", "h100", "h200", "b200")
    assert beside == {"cpu-gloo": 1.0} | dict.fromkeys(gpus, 0.85)


def test_float8_that_was_not_measured_counts_as_bfloat16(caplog):
    h100 = preset("h100")
    assert h100.peak("float8_e5m2").tflops == 2 * h100.peak("bfloat16").tflops
    with caplog.at_level(logging.WARNING):
        assert preset("a100").peak("float8_e4m3fn") == preset("a100").peak("bfloat16")
    assert "'a100' has no peak for float8_e4m3fn; counted as bfloat16" in caplog.text
