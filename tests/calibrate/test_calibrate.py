"""Calibration: the fit finds what the samples were made from, and the command writes a file."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inductor_passes.machine.cluster_file import load
from inductor_passes.machine.links import Link, check_ramp
from inductor_passes.machine.presets import preset
from simplefsdp.calibrate import command, measure
from simplefsdp.calibrate.fit import Sample, fit_link, fit_ramp, ramp_us, worst_error
from simplefsdp.cli import main
from simplefsdp.launcher import launch
from simplefsdp.launcher.ranks import Rank

SIZES = [2**e for e in range(12, 28, 2)]
ROOT = Path(__file__).parents[2]


def samples_of(link: Link, ranks: int, noise: float = 0.0) -> list[Sample]:
    rng = random.Random(0)
    return [Sample(n, link.us(n, ranks) * rng.uniform(1 - noise, 1 + noise)) for n in SIZES]


@pytest.mark.parametrize("link", [Link(30.0, 394.0), Link(200.0, 1.5), Link(1.0, 0.01)])
def test_a_line_is_recovered(link: Link) -> None:
    fitted = fit_link(samples_of(link, 8), 8)
    assert fitted.latency_us == pytest.approx(link.latency_us)
    assert fitted.gb_s == pytest.approx(link.gb_s)
    assert fitted.ramp == ()


def test_a_line_without_latency_is_recovered() -> None:
    fitted = fit_link(samples_of(Link(0.0, 2.0), 4), 4)
    assert fitted.latency_us == pytest.approx(0.0, abs=1e-6)
    assert fitted.gb_s == pytest.approx(2.0)


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_moves_the_fit_by_about_as_much(noise: float) -> None:
    link = Link(100.0, 10.0)
    fitted = fit_link(samples_of(link, 2, noise), 2)
    assert fitted.latency_us == pytest.approx(link.latency_us, rel=2 * noise)
    assert fitted.gb_s == pytest.approx(link.gb_s, rel=2 * noise)


def test_a_ramp_fits_where_a_line_does_not() -> None:
    link = Link(5.0, 100.0, ((2**12, 0.02), (2**20, 1.0)))
    samples = samples_of(link, 4)
    fitted = fit_link(samples, 4)
    assert fitted.ramp
    assert fitted.gb_s == pytest.approx(100.0, rel=0.1)
    assert worst_error(fitted, samples, 4) < 0.2


def test_what_does_not_depend_on_size_is_all_latency() -> None:
    fitted = fit_link([Sample(n, 50.0 - i) for i, n in enumerate(SIZES)], 2)
    assert worst_error(fitted, [Sample(n, 50.0) for n in SIZES], 2) < 0.2


def test_every_fit_is_a_valid_link() -> None:
    rng = random.Random(1)
    for _ in range(200):
        times = [Sample(n, rng.uniform(1, 1000)) for n in rng.sample(SIZES, rng.randint(2, 6))]
        link = fit_link(times, 4)
        assert link.gb_s > 0 <= link.latency_us


def test_a_delay_of_one_size_does_not_show() -> None:
    link = Link(100.0, 2.0)
    samples = samples_of(link, 2)
    samples[0] = samples[0]._replace(us=9e3)
    fitted = fit_link(samples, 2)
    assert worst_error(fitted, samples_of(link, 2), 2) < 0.1


def test_two_sizes_are_needed() -> None:
    with pytest.raises(ValueError, match="two sizes or more, got 1"):
        fit_link([Sample(4096, 10.0)], 2)


def test_a_ramp_of_rates_is_recovered_and_made_monotone() -> None:
    peak, ramp = fit_ramp([(1e6, 10.0), (1e8, 40.0), (1e9, 50.0)])
    assert (peak, ramp) == (50.0, ((1e6, 0.2), (1e8, 0.8), (1e9, 1.0)))
    assert ramp_us(peak, ramp, 1e8) == pytest.approx(1e8 / 40)
    # 30 and 20 become their mean; a rate that rose 20-fold over twice the size is cut to twice.
    peak, ramp = fit_ramp([(1.0, 1.0), (2.0, 30.0), (4.0, 20.0)])
    assert (peak, ramp) == (4.0, ((1.0, 0.25), (2.0, 0.5), (4.0, 1.0)))
    check_ramp("ramp", ramp)
    peak, ramp = fit_ramp([(1.0, 20.0), (2.0, 30.0), (4.0, 15.0)], falls=True)
    assert (peak, [reached * peak for _, reached in ramp]) == (30.0, [20.0, 30.0, 15.0])


@pytest.mark.parametrize(
    ("world", "local", "found"),
    [
        (2, 2, [(2, 1)]),
        (6, 6, [(2, 1), (4, 1), (6, 1)]),
        (32, 8, [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4)]),
        (3, 1, [(2, 2), (3, 3)]),
        (1, 1, []),
    ],
)
def test_groups_to_measure(world: int, local: int, found: list[tuple[int, int]]) -> None:
    assert list(measure.groups_of(world, local)) == found


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--ranks 1", "--ranks 1: links are measured between 2 ranks or more"),
        ("--ranks 0 --links h100", "--ranks 0"),
        ("--nbytes-max 10", "--nbytes-max must be 128 or more for 2 ranks, got 10"),
        ("--links h900", "no preset 'h900'"),
        ("--links no.json", "no.json: No such file"),
        ("--out nowhere/cluster.json", "--out nowhere/cluster.json: cannot write there: No such"),
        ("--out text/cluster.json", "--out text/cluster.json: cannot write there: Not a dir"),
        ("--out .", "--out . is a folder"),
        ("--model 9b", "unknown --model '9b': choose one of debug, 160m, 1b, 8b, 70b, 405b"),
        ("--ranks 1 --links h100 --model 8b", "--model is for links that are measured"),
    ],
)
def test_bad_input_is_found_before_anything_is_measured(
    args: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_local_ranks", refuse)
    monkeypatch.chdir(tmp_path)
    Path("text").touch()
    assert run("calibrate", *args.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert named in message
    assert [p.name for p in Path().iterdir()] == ["text"]


def test_help_teaches_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("calibrate", "--help") == 0
    text = capsys.readouterr().out
    examples = text.split("examples:")[1].split("\n\n")[0].strip()
    commands = [shlex.split(line) for line in examples.splitlines()]
    assert len(commands) >= 4
    for words in commands:
        command.parse(words[words.index("calibrate") + 1 :])


def calibrate(*args: str, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in more.items()}
    # With the CPU's vectors, as users have them: without, the attention in bfloat16 of torch 2.15
    # fails on a CPU that has bfloat16 ("pack_vnni2 is only supported when avx512 is supported").
    environment.pop("ATEN_CPU_CAPABILITY", None)
    return subprocess.run(
        [sys.executable, "-m", "simplefsdp", "calibrate", *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_two_ranks_write_a_cluster(tmp_path: Path) -> None:
    done = calibrate("--quick", "--nbytes-max", "65536", "--out", "two.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gather, 2 ranks on 1 node" in done.stdout
    assert "float32 matmul" in done.stdout
    assert done.stdout.strip().endswith('use it as options={"cluster": "two.json"}')
    assert [p.name for p in tmp_path.iterdir()] == ["two.json"]
    cluster = load(tmp_path / "two.json")
    assert (cluster.name, cluster.ranks_per_node) == ("two", 2)
    assert [(w.kind, w.ranks, w.nodes) for w in cluster.wires] == [
        ("gather", 2, 1),
        ("reduce", 2, 1),
        ("all_reduce", 2, 1),
    ]
    assert {*cluster.peaks} >= {"float32", "bfloat16"}
    assert 0 < cluster.compute_beside <= 1
    told = f"compute has {cluster.compute_beside:.0%} of its speed"
    assert told in done.stdout or "too short to tell" in done.stdout
    assert "--quick" in cluster.source and "2 ranks, gloo" in cluster.source
    with pytest.raises(ValueError, match="gather among 4 ranks on 1 node"):
        cluster.link("gather", 4, 1)
    json.loads((tmp_path / "two.json").read_text())


@pytest.mark.slow
def test_one_rank_under_a_launcher_takes_its_links_from_a_preset(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    arguments = ("--quick", "--links", "h100", "--out", "one.json")
    done = calibrate(*arguments, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    cluster = load(tmp_path / "one.json")
    assert (cluster.wires, cluster.ranks_per_node) == (preset("h100").wires, 8)
    assert "links of h100" in cluster.source and cluster.compute_beside == 1


def on_this_node(sizes: list[int]) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[dist.get_rank()])
    try:
        rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        return str(command._local_size(rank))
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_nodes_of_unequal_ranks_are_refused_by_all(pools) -> None:
    assert pools(2).run(on_this_node, [2, 2]) == ["2", "2"]
    for said in pools(2).run(on_this_node, [2, 1]):
        assert "as many ranks on every node, got 1 on one and 2 on another" in said
