"""Options, schedule and layout: what needs neither ranks nor files."""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes.passes import REMEDY, PassError
from simplefsdp.launcher.errors import UserError
from simplefsdp.launcher.ranks import Rank, check_devices
from simplefsdp.models.layout import RankLayout, plan_layout
from simplefsdp.models.options import ParallelOptions
from simplefsdp.train import command, loop, runs
from simplefsdp.train.build import learning_rate, make_optimizer
from simplefsdp.train.config import (
    CompileOptions,
    DataOptions,
    OptimOptions,
    PlanOptions,
    RunOptions,
    TrainConfig,
    as_flags,
    check_options,
)
from simplefsdp.train.dry_run import plan_memory
from simplefsdp.train.preflight import plan_run
from simplefsdp.train.state import rng_state, set_rng_state


def test_learning_rate_warms_up_linearly_then_falls_to_a_tenth() -> None:
    options = OptimOptions(steps=100, warmup_steps=10, lr=2.0)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(2.0 / 10)
    halfway = 10 + (99 - 10) / 2
    middle = (rates[int(halfway)] + rates[int(halfway) + 1]) / 2
    assert middle == pytest.approx(2.0 * (1 + 1 / 10) / 2)


def test_learning_rate_does_not_depend_on_where_a_session_stops() -> None:
    whole = OptimOptions(steps=40)
    half = OptimOptions(steps=40, stop_after=20)
    assert [learning_rate(s, half) for s in range(20)] == [
        learning_rate(s, whole) for s in range(20)
    ]


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_learning_rate_of_the_shortest_runs_is_positive(steps: int) -> None:
    options = OptimOptions(steps=steps)
    assert all(0 < learning_rate(step, options) <= options.lr for step in range(steps))


def test_config_survives_json_but_for_what_belongs_to_one_session() -> None:
    config = TrainConfig(
        data=DataOptions(data=Path("some/text"), seq_len=7),
        optim=OptimOptions(steps=9, stop_after=3),
        run=RunOptions(out=Path("here"), resume="latest", keep=5),
        plan=PlanOptions(dry_run=True, world_size=4),
    )
    saved = json.loads(json.dumps(config.to_json()))
    saved["run"]["option_of_a_later_version"] = 1
    loaded = TrainConfig.from_json(saved)
    assert loaded == dataclasses.replace(
        config,
        optim=OptimOptions(steps=9),
        run=RunOptions(out=Path("here"), keep=5),
        plan=PlanOptions(),
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (TrainConfig(optim=OptimOptions(steps=0)), "--steps"),
        (TrainConfig(optim=OptimOptions(lr=float("nan"))), "--lr"),
        (TrainConfig(optim=OptimOptions(steps=5, warmup_steps=6)), "--warmup-steps"),
        (TrainConfig(data=DataOptions(seq_len=1)), "--seq-len"),
        (TrainConfig(parallel=ParallelOptions(shard_size=2)), "--shard-size"),
        (TrainConfig(plan=PlanOptions(world_size=2)), "--world-size"),
        (TrainConfig(compile=CompileOptions(compile=False, whole_step=True)), "--whole-step"),
    ],
)
def test_impossible_options_are_refused_by_name(config: TrainConfig, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_options(config)


@pytest.mark.parametrize(
    ("named", "said"),
    [("h10", "cluster: there is no preset 'h10'"), ("x.json", "cluster file x.json: No such file")],
)
def test_a_bad_cluster_is_told_in_its_own_words(named: str, said: str) -> None:
    """They were in brackets, between what was expected and what came."""
    with pytest.raises(ValueError, match=f"^{said}"):
        check_options(TrainConfig(compile=CompileOptions(cluster=named)))


def test_layout_splits_ranks_by_mode() -> None:
    assert plan_layout(ParallelOptions(tp=2), 8, 8) == RankLayout(1, 4, 2)
    assert plan_layout(ParallelOptions(mode="replicate"), 8, 8) == RankLayout(8, 1, 1)
    hybrid = ParallelOptions(mode="hybrid_shard")
    assert plan_layout(hybrid, 32, 8) == RankLayout(4, 8, 1)
    assert plan_layout(dataclasses.replace(hybrid, tp=4), 32, 8) == RankLayout(4, 2, 4)
    assert plan_layout(dataclasses.replace(hybrid, shard_size=16), 32, 8) == RankLayout(2, 16, 1)


@pytest.mark.parametrize(
    ("options", "world_size", "named"),
    [
        (ParallelOptions(tp=3), 8, "--tp 3"),
        (ParallelOptions(mode="hybrid_shard"), 8, "groups of 8"),
        (ParallelOptions(mode="hybrid_shard", shard_size=3), 8, "groups of 3"),
    ],
)
def test_layout_refuses_ranks_that_do_not_divide(
    options: ParallelOptions, world_size: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        plan_layout(options, world_size, 8)


def test_micro_batches_divide_the_sequences_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(Path(__file__).read_bytes())
    config = TrainConfig(
        data=DataOptions(data=tmp_path / "text", seq_len=16, global_batch_size=4),
        optim=OptimOptions(gradient_accumulation_steps=3),
        run=RunOptions(out=tmp_path / "out"),
    )
    message = "--gradient-accumulation-steps 3 does not divide the 2 sequences that each of 2"
    with pytest.raises(UserError, match=message):
        plan_run(config, world_size=2, node_ranks=2)
    with pytest.raises(ValueError, match="--gradient-accumulation-steps must be at least 1"):
        check_options(TrainConfig(optim=OptimOptions(gradient_accumulation_steps=0)))


def test_full_gradients_that_wait_are_planned_for() -> None:
    layout = plan_layout(ParallelOptions(), 8, 8)
    once, twice = (
        plan_memory(TrainConfig(optim=OptimOptions(gradient_accumulation_steps=n)), layout)
        for n in (1, 2)
    )
    assert once.deferred_nbytes == 0
    assert twice.deferred_nbytes == 4 * twice.n_parameters  # in fp32
    assert twice.total_nbytes == once.total_nbytes + twice.deferred_nbytes


def test_more_ranks_than_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2)
    with pytest.raises(ValueError, match=r"3 local ranks.*2 CUDA devices"):
        check_devices(3)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    names = ("step-00000100", "step-00000020", "step-00000300", ".step-00000400.tmp", "other")
    for name in names:
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
        if "300" not in name:
            (folder / "trainer.json").touch()
    assert [runs.step_of(c) for c in runs.complete_checkpoints(tmp_path)] == [20, 100]
    assert [p.name for p in runs.leftovers(tmp_path)] == [".step-00000400.tmp"]
    assert runs.find_checkpoint("latest", tmp_path) == runs.step_folder(tmp_path, 100)


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = pytest.raises(ValueError, match="another run is writing to")
    with runs.lock(run), refused, runs.lock(run):
        pass
    for step in (None, 100):  # be there a checkpoint of the other run already, or not
        if step:
            checkpoint = runs.step_folder(run, step)
            checkpoint.mkdir(parents=True)
            for name in (".metadata", "trainer.json"):
                (checkpoint / name).touch()
        with runs.lock(run), refused:
            runs.check_out(run, resumed=None)
    with runs.lock(run):
        pass


def test_random_states_come_back() -> None:
    cpu = torch.device("cpu")
    random.gauss(0, 1)  # leaves a second number behind, which belongs to the state
    saved = rng_state(cpu)
    drawn = random.random(), random.gauss(0, 1), torch.rand(3)
    set_rng_state(saved, cpu)
    again = random.random(), random.gauss(0, 1), torch.rand(3)
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


def test_only_matrices_are_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    model[0].weight.requires_grad_(True)
    model[1].bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimOptions(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {id(model[0].weight): 0.5, id(model[0].bias): 0.0, id(model[1].weight): 0.0}


def test_one_kernel_updates_all_parameters() -> None:
    def kinds(device: str) -> list[tuple[bool, bool]]:
        model = torch.nn.ParameterList(torch.empty(n, device=device) for n in ((3, 3), (3,)))
        optimizer = make_optimizer(model, OptimOptions())
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return [(bool(g["fused"]), bool(g["foreach"])) for g in optimizer.param_groups]

    with FakeTensorMode():
        assert kinds("cuda") == [(True, False)] * 2
    assert kinds("cpu") == [(True, False)] * 2
    assert kinds("meta") == [(False, True)] * 2


@pytest.mark.parametrize(
    ("told", "flags"),
    [
        (REMEDY, "--bucketing none compiles without the passes"),
        ("pass options={'cluster': ...}, one of", "pass --cluster ..., one of"),
        ("(memory_budget_gb=0.003155 or more)", "(--memory-budget-gb 0.003155 or more)"),
        ("options['memory_budget_gb']: expected", "--memory-budget-gb: expected"),
        ("or choose bucketing='auto'", "or choose --bucketing auto"),
        ("the graph's bucketing is none", "the graph's bucketing is none"),
    ],
)
def test_options_of_the_compiler_are_told_as_flags(told: str, flags: str) -> None:
    assert as_flags(told) == flags


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        (PassError(f"a defect; {REMEDY}"), PassError, "a defect; --bucketing none compiles"),
        (RuntimeError(f"PassError: a defect; {REMEDY}"), PassError, "a defect; --bucketing none"),
        (ValueError("Allow memory_budget_gb=3"), UserError, "Allow --memory-budget-gb 3"),
        (ValueError("another defect"), ValueError, "another defect"),
        (KeyError("bucketing=none"), KeyError, "bucketing=none"),
    ],
)
def test_what_the_compiler_says_of_a_run_names_flags(monkeypatch, raised, kind, told) -> None:
    def fail(*_):
        raise raised

    one = Rank(0, 1, torch.device("cpu"))
    monkeypatch.setattr("simplefsdp.train.loop.train", fail)
    monkeypatch.setattr("simplefsdp.train.command.follow_launcher", lambda: None)
    monkeypatch.setattr("simplefsdp.launcher.ranks.join_ranks", lambda: nullcontext(one))
    monkeypatch.setattr(
        "simplefsdp.launcher.ranks.on_rank_zero", lambda *_: SimpleNamespace(finished=False)
    )
    with pytest.raises(kind, match=told) as caught:
        command._run_rank([])
    assert type(caught.value) is kind


def test_a_budget_that_is_none_is_refused_as_its_flag() -> None:
    config = TrainConfig(compile=CompileOptions(memory_budget_gb=-1.0))
    with pytest.raises(ValueError, match=r"^--memory-budget-gb: expected 1e9 bytes"):
        check_options(config)


def test_the_loss_is_read_when_it_is_reported_and_in_no_other_step(monkeypatch) -> None:
    """To read it waits for the device, which is then idle until the next step is queued."""
    run = RunOptions(log_every=10, eval_every=0, checkpoint_every=7)
    config = SimpleNamespace(
        run=run, compile=CompileOptions(compile=False), last_step=25, optim=OptimOptions()
    )
    session = SimpleNamespace(
        plan=SimpleNamespace(config=config, first_step=0),
        step=0,
        stopped_by=0,
        stop=SimpleNamespace(received=0, listen=lambda: None),
        display=SimpleNamespace(busy=lambda text: None),
        checkpoints=SimpleNamespace(poll=lambda: None),
    )
    read = []

    class Loss:
        def clone(self) -> torch.Tensor:
            read.append(session.step)
            return torch.zeros(())

    monkeypatch.setattr(loop, "_update", lambda session: SimpleNamespace(loss=Loss()))
    monkeypatch.setattr(loop.dist, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 1)
    for name in ("_record", "_report", "_save_or_poll"):
        monkeypatch.setattr(loop, name, lambda *args: None)
    loop._train_steps(session)
    assert read == [1, 7, 10, 14, 20, 21, 25]
