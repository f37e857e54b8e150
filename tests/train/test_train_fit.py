"""``--microbatch-size auto``: what a rank computes at once is what it has memory for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import save
from inductor_passes.machine.presets import preset
from simplefsdp.launcher.errors import UserError
from simplefsdp.models.layout import plan_layout
from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.sweep.cells import Cell, CellStep
from simplefsdp.train import command, elastic, fit, runs
from simplefsdp.train.config import (
    CompileOptions,
    DataOptions,
    OptimOptions,
    RunOptions,
    TrainConfig,
)
from simplefsdp.train.dry_run import plan_memory
from simplefsdp.train.preflight import plan_run

RANKS, PART = 2, 16


def config_of(**optim: object) -> TrainConfig:
    return TrainConfig(
        model=ModelOptions("debug", "full"),
        data=DataOptions(seq_len=64, global_batch_size=RANKS * PART),
        optim=OptimOptions(**{"microbatch_size": "auto", **optim}),
        parallel=ParallelOptions(mixed_precision="none"),
    )


BASE, EACH = 50 * 10**6, 10**6  # bytes of a step, and of each sequence in it


class _Sweep:
    """In the place of a :class:`simplefsdp.sweep.traces.CellSweep`."""

    def __init__(self, model: object, parallel: object, cluster: Cluster, plan: object) -> None:
        self.room = int(cluster.memory_gb * 1e9)

    def steps(self, cells: Sequence[Cell]) -> list[CellStep]:
        peaks = [BASE + EACH * cell.batch for cell in cells]
        return [
            CellStep(cell, 1.0, 0.0, 1.0, 0.0, peak, self.room)
            for cell, peak in zip(cells, peaks, strict=True)
        ]


def test_all_of_it_if_that_fits_else_as_much_as_does_beside_gradients_that_wait(monkeypatch):
    monkeypatch.setattr(fit, "CellSweep", _Sweep)
    config = config_of()
    layout = plan_layout(config.parallel, RANKS, RANKS)
    one = replace(config, optim=OptimOptions(microbatch_size=1))
    waiting = plan_memory(one, layout).deferred_nbytes
    assert 10 * EACH < waiting < 14 * EACH

    def chosen(room_nbytes: int) -> int:
        cluster = replace(preset("cpu-gloo"), memory_gb=room_nbytes / 1e9)
        return fit.largest_microbatch(config, layout, cluster)

    whole = BASE + PART * EACH
    assert chosen(whole) == PART
    assert chosen(whole - 1) == (whole - 1 - waiting - BASE) // EACH < PART
    words = r"takes 0\.1 GB beside 0\.0 GB of full gradients that wait"
    words += f".* {waiting / 1e6:.0f} MB too little; give a shorter"
    with pytest.raises(ValueError, match=f"one sequence of 64 tokens {words}"):
        chosen(BASE + EACH)


@pytest.fixture
def run(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text").write_bytes(bytes(range(128)) * 400)
    data = DataOptions(data=tmp_path / "text", seq_len=64, global_batch_size=RANKS * PART)
    return replace(config_of(), data=data, run=RunOptions(out=tmp_path / "out"))


def test_each_start_takes_what_fits_its_ranks(run: TrainConfig, monkeypatch, capsys) -> None:
    """And never more than the first."""
    fits, at_once = {2: 5, 1: 3, 4: 7}, {2: 4, 1: 2, 4: 4}  # five do not divide sixteen
    for ranks in (2, 1, 4, 2):
        monkeypatch.setattr(fit, "processes", lambda *args, n=fits[ranks]: _Done(n))
        plan = plan_run(run, ranks, ranks)
        assert plan.batch.notice is None and plan.batch.sequences == RANKS * PART
        assert plan.batch.at_once == at_once[ranks]
        run = TrainConfig.from_json(json.loads(json.dumps(plan.saved.to_json())))
        assert (run.optim.microbatch_size, run.optim.microbatch_limit) == ("auto", 5)
    first, fewer, more, _ = [line for line in capsys.readouterr().out.split("\n") if "64" in line]
    assert "5 sequences of 64 tokens at once: what each of 2 data-parallel ranks has" in first
    assert "3 sequences of 64 tokens at once: what each of 1 data-parallel ranks has" in fewer
    assert "5 sequences of 64 tokens at once: --microbatch-limit" in more and "7 would fit" in more


def test_a_launcher_leaves_it_to_rank_zero(run: TrainConfig, monkeypatch) -> None:
    monkeypatch.setattr(fit, "processes", None)
    assert plan_run(run, RANKS, RANKS, fits=False).saved.optim.microbatch_size == "auto"


class _Done:
    """In the place of a pool of processes: what comes of all that it is given."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function, *args):
        self.asked = args
        return self

    def result(self) -> int:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_a_prediction_that_ends_without_an_answer(monkeypatch) -> None:
    monkeypatch.setattr(fit, "processes", lambda *args: _Done(BrokenProcessPool()))
    with pytest.raises(UserError, match=r"ended without an answer.*give a number"):
        plan_run(config_of(), RANKS, RANKS)


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As where ranks run: this one may be one of them."""
    save(tmp_path / "cluster.json", replace(preset("cpu-gloo"), memory_gb=0.03))
    config = replace(config_of(), compile=CompileOptions(cluster=str(tmp_path / "cluster.json")))
    with pytest.raises(ValueError, match="give a shorter --seq-len"):
        fit.fitted(config, plan_layout(config.parallel, RANKS, RANKS), "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compile": CompileOptions(compile=False)}, "got --no-compile: leave that out"),
        ({"compile": CompileOptions(executor="aot_eager")}, "got --executor aot_eager"),
        (
            {"optim": OptimOptions(microbatch_size="auto", gradient_accumulation_steps=2)},
            "got --gradient-accumulation-steps: leave that out",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(changes: dict[str, object], words: str) -> None:
    config = replace(config_of(), **changes)
    with pytest.raises(UserError, match=words):
        plan_run(config, RANKS, RANKS)


def test_what_is_predicted_is_what_runs(monkeypatch) -> None:
    """In the precision of the device, and laid out over nodes of as many ranks."""
    pool = _Done(5)
    monkeypatch.setattr(fit, "processes", lambda *args: pool)
    spread = ParallelOptions(mode="hybrid_shard", mixed_precision="auto")
    config = replace(config_of(), parallel=spread)
    layout = plan_layout(spread, 16, 4)
    for device, precision in (("cuda", "bf16"), ("cpu", "none")):
        assert fit.fitted(config, layout, device).parallel is spread
        asked = pool.asked[0].parallel
        assert (asked.mixed_precision, asked.shard_size) == (precision, 4)
        assert plan_layout(asked, 16, 8) == layout


@pytest.mark.parametrize(
    ("before", "given", "now"),
    [
        ({"microbatch_size": 32}, "--microbatch-size auto", ("auto", None)),  # as all are saved
        ({"microbatch_limit": 3}, "", ("auto", 3)),
        ({"microbatch_limit": 3}, "--microbatch-limit 9", ("auto", 9)),
        ({"microbatch_limit": 3}, "--microbatch-size 4", (4, None)),
    ],
)
def test_what_a_resumed_run_asks_for(
    before: dict[str, int], given: str, now: tuple[object, object], run: TrainConfig, monkeypatch
) -> None:
    saved = replace(run, optim=replace(run.optim, **before))
    state = SimpleNamespace(config=saved.to_json())
    checkpoint = run.run.out / "checkpoints" / "step-00000001"
    monkeypatch.setattr(runs, "find_checkpoint", lambda *args: checkpoint)
    monkeypatch.setattr(runs, "read_trainer_state", lambda path: state)
    config = command.parse(["--resume", str(run.run.out), *given.split()])
    kept = elastic.for_any_ranks(config, RANKS).optim
    assert (kept.microbatch_size, kept.microbatch_limit) == now


def test_another_word_is_refused() -> None:
    saved = config_of().to_json()
    assert TrainConfig.from_json(saved).optim.microbatch_size == "auto"
    saved["optim"]["microbatch_size"] = "most"
    with pytest.raises(ValueError, match="microbatch_size"):
        TrainConfig.from_json(saved)
