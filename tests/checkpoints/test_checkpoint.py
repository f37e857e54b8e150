"""Checkpoints on real ranks: exact resume, other rank counts, FSDP2, the plain model, crashes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launched import ranks_of
from plain_checkpoint import load_plain
from ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from simplefsdp.launcher.errors import RunFailed
from simplefsdp.launcher.ranks import Rank
from simplefsdp.models import CONFIGS, LlamaConfig
from simplefsdp.models.llama3 import Llama
from simplefsdp.train import command, loop, runs
from simplefsdp.train.export import ExportOptions, export
from simplefsdp.train.loop import train
from simplefsdp.train.preflight import plan_run

CONFIGS["micro"] = LlamaConfig(  # 34 rows: uneven on 4 ranks, and on 2 once tp has halved them
    vocab_size=256, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=34, rope_scaling=None,
    bos_token_id=255, eos_token_id=255, max_seq_len=128,
)  # fmt: skip
MICRO = (
    "--model micro --data text --seq-len 16 --global-batch-size 4 --eval-batches 1 "
    "--sample-tokens 3 --steps 6 --checkpoint-every 2 --no-compile --log-every 1"
)


def train_here(folder: str, options: str) -> int:
    """Run the trainer on the ranks of a pool, in ``folder``."""
    os.chdir(folder)
    dist.barrier()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = command.parse(options.split())
    plan = plan_run(config, world_size, node_ranks=world_size)
    dist.barrier()
    return train(plan, Rank(rank, world_size, torch.device("cpu")))


def curve(run: Path) -> list[tuple[Any, ...]]:
    """Everything in the metrics that must not depend on when a run was stopped."""
    lines = (run / runs.METRICS).read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if "loss" in r]
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in steps]


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def pool(pools: Any) -> RankPool:
    return pools(2)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Holds ``text`` and ``whole``, a run of 6 steps that was never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").write_bytes(Path(__file__).read_bytes())
    leftover = folder / "whole/checkpoints/.step-00000099.tmp"
    leftover.mkdir(parents=True)
    assert pool.run(train_here, str(folder), f"{MICRO} --out whole") == [0, 0]
    assert not leftover.exists()
    return folder


def test_keeps_the_last_checkpoints_and_the_text_is_learned(folder: Path) -> None:
    kept = runs.complete_checkpoints(folder / "whole")
    assert [runs.step_of(c) for c in kept] == [4, 6]
    assert [p.name for p in (folder / "whole/checkpoints").iterdir() if p not in kept] == []
    lines = (folder / "whole" / runs.METRICS).read_text().splitlines()
    held_out = [r["validation_loss"] for r in map(json.loads, lines) if "validation_loss" in r]
    assert held_out[-1] < held_out[0]
    assert [step for step, *_ in curve(folder / "whole")] == [1, 2, 3, 4, 5, 6]
    assert list((folder / "whole" / runs.TENSORBOARD).glob("events*"))


@pytest.mark.slow(quick=["--no-compile"])
@pytest.mark.parametrize(
    "compiling",
    [
        "--no-compile",
        "--compile --executor aot_eager",
        "--compile --executor aot_eager --whole-step",
    ],
)
def test_resume_is_exact(folder: Path, pool: RankPool, compiling: str) -> None:
    kind = compiling.rsplit(maxsplit=1)[-1].strip("-")
    whole, halves = f"whole-{kind}", f"halves-{kind}"
    pool.run(train_here, str(folder), f"{MICRO} {compiling} --out {whole}")
    pool.run(train_here, str(folder), f"{MICRO} {compiling} --stop-after 3 --out {halves}")
    assert [step for step, *_ in curve(folder / halves)] == [1, 2, 3]
    with (folder / halves / runs.METRICS).open("a") as metrics:
        metrics.write('{"step": 4, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0}\n{"step": 5, "lo')
    pool.run(train_here, str(folder), f"--resume {halves}")
    assert curve(folder / halves) == curve(folder / whole)
    one, two = (saved_tensors(runs.step_folder(folder / r, 6)) for r in (whole, halves))
    assert one.keys() == two.keys()
    assert "optimizer.state.layers.0.mlp.down_proj.weight.exp_avg_sq" in one
    assert "rng.1.torch" in one
    different = [key for key in one if not torch.equal(one[key], two[key])]
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--whole-step"])
def test_gradient_accumulation_changes_memory_not_numbers(
    folder: Path, pool: RankPool, more: str
) -> None:
    accumulated = f"{MICRO} --gradient-accumulation-steps 2 --compile --executor aot_eager {more}"
    pool.run(train_here, str(folder), f"{accumulated} --out accumulated{more}")
    runs_ = ("whole", f"accumulated{more}")
    one, two = ([loss for _, loss, *_ in curve(folder / r)] for r in runs_)
    assert one == pytest.approx(two, rel=1e-4)
    assert one[0] != one[-1]


def test_loads_into_the_plain_model(folder: Path) -> None:
    checkpoint = runs.step_folder(folder / "whole", 6)
    model = Llama(CONFIGS["micro"])
    load_plain(checkpoint, model)
    saved = saved_tensors(checkpoint)
    for fqn, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[f"model.{fqn}"])
    with pytest.raises(ValueError, match="is of another model: it has"):
        load_plain(checkpoint, Llama(CONFIGS["debug"]))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_plain(folder, model)


def fsdp2_model() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Llama(CONFIGS["micro"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def load_into_fsdp2(checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe of PyTorch's own documentation."""
    model, optimizer = fsdp2_model()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    moment = optimizer.state[model.lm_head.weight]["exp_avg"]
    return full(model.state_dict()), full({"exp_avg": moment})


def test_loads_into_fsdp2(folder: Path, pool: RankPool) -> None:
    checkpoint = runs.step_folder(folder / "whole", 6)
    saved = saved_tensors(checkpoint)
    for weights, state in pool.run(load_into_fsdp2, str(checkpoint)):
        for fqn, tensor in weights.items():
            assert torch.equal(tensor, saved[f"model.{fqn}"])
        assert torch.equal(state["exp_avg"], saved["optimizer.state.lm_head.weight.exp_avg"])


def save_from_fsdp2(checkpoint: str) -> dict[str, Any]:
    model, optimizer = fsdp2_model()
    model(torch.arange(8).view(1, 8)).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    return full(model.state_dict())


def test_fsdp2_checkpoints_load_here(folder: Path, pool: RankPool) -> None:
    foreign = folder / "fsdp2"
    weights = pool.run(save_from_fsdp2, str(foreign))[0]
    # With a learning rate next to nothing, what is saved after a step is what was loaded.
    pool.run(
        train_here, str(folder), f"{MICRO} --steps 1 --lr 1e-30 --resume {foreign} --out from-fsdp2"
    )
    saved = saved_tensors(runs.step_folder(folder / "from-fsdp2", 1))
    for fqn, tensor in weights.items():
        assert torch.equal(tensor, saved[f"model.{fqn}"])
    assert saved["optimizer.state.norm.weight.step"] == 2.0  # one there, one here


def fail_to_write(step: int, folder: str, options: str) -> str:
    """Train while rank 1 finds its disk full at ``step``; returns how the run failed, or ""."""
    write_data = FileSystemWriter.write_data

    def full_disk(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1 and f"step-{step:08d}" in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, *args)

    FileSystemWriter.write_data = full_disk  # type: ignore[method-assign]
    try:
        train_here(folder, options)
    except RunFailed as error:
        return str(error)
    finally:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    return ""


def test_a_failed_save_is_reported_and_does_not_end_training(folder: Path, pool: RankPool) -> None:
    outcome = pool.run(fail_to_write, 2, str(folder), f"{MICRO} --steps 4 --out full-disk")
    assert outcome == ["", ""]
    assert [runs.step_of(c) for c in runs.complete_checkpoints(folder / "full-disk")] == [4]
    outcome = pool.run(fail_to_write, 4, str(folder), f"{MICRO} --steps 4 --out full-at-end")
    assert all("rank 1: the disk of full-at-end had no free space" in why for why in outcome)
    assert [runs.step_of(c) for c in runs.complete_checkpoints(folder / "full-at-end")] == [2]


def lose_the_loss(folder: str, options: str) -> str:
    try:
        train_here(folder, options)
    except RunFailed as error:
        return str(error)
    return ""


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    folder: Path, pool: RankPool
) -> None:
    outcome = pool.run(
        lose_the_loss, str(folder), f"{MICRO} --lr 1e30 --steps 6 --checkpoint-every 1 --out nan"
    )
    assert all("Lower --lr" in failure for failure in outcome)
    saved_before = runs.complete_checkpoints(folder / "nan")
    assert saved_before
    for checkpoint in saved_before:
        saved = saved_tensors(checkpoint)
        assert all(t.isfinite().all() for k, t in saved.items() if k.startswith("optimizer"))


def lose_the_loss_and_look_early(folder: str, options: str) -> str:
    """The loss is lost; the last rank looks for checkpoints before rank 0 has put one in place."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(runs, "complete_checkpoints", lambda run: [])
        return lose_the_loss(folder, options)


def test_ranks_name_the_same_checkpoint_when_the_loss_is_lost(folder: Path, pool: RankPool) -> None:
    options = f"{MICRO} --lr 1e30 --steps 6 --checkpoint-every 1 --out nan-early"
    first, second = pool.run(lose_the_loss_and_look_early, str(folder), options)
    assert first == second
    assert "last checkpoint: nan-early/checkpoints/step-0000000" in first


def test_a_loss_that_is_not_finite_is_not_saved_between_reports(
    folder: Path, pool: RankPool
) -> None:
    options = f"{MICRO} --lr 1e30 --log-every 50 --checkpoint-every 3 --out nan-between"
    outcome = pool.run(lose_the_loss, str(folder), options)
    assert all("step 3: loss" in failure for failure in outcome)
    assert runs.complete_checkpoints(folder / "nan-between") == []


def stop_one_rank(step: int, folder: str, options: str) -> int:
    """Train; the last rank gets a signal while it makes that step."""
    update = loop._update

    def stopping(session: Any) -> Any:
        if session.step + 1 == step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(session)

    loop._update = stopping
    try:
        return train_here(folder, options)
    finally:
        loop._update = update


def test_a_signal_is_not_kept_waiting_for_the_next_report(folder: Path, pool: RankPool) -> None:
    options = f"{MICRO} --steps 50 --log-every 40 --checkpoint-every 40 --out stopped"
    assert pool.run(stop_one_rank, 4, str(folder), options) == [128 + signal.SIGTERM] * 2
    assert [step for step, *_ in curve(folder / "stopped")] == [1, 4]
    assert [runs.step_of(c) for c in runs.complete_checkpoints(folder / "stopped")] == [4]


def test_export_gives_transformers_the_same_logits(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export(ExportOptions(folder / "whole", folder / "exported"))
    ours = Llama(CONFIGS["micro"])
    load_plain(runs.step_folder(folder / "whole", 6), ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="already exists"):
        export(ExportOptions(folder / "whole", folder / "exported"))


_STALLING_TRAINER = """
import os, pathlib, sys, time
from torch.distributed.checkpoint.filesystem import FileSystemWriter
import test_checkpoint
from simplefsdp.cli import main

write_data = FileSystemWriter.write_data
def stall(self, *args):
    if os.environ["RANK"] == "1" and "step-00000004" in str(self.path):
        pathlib.Path("stalled").touch()
        time.sleep(600)
    return write_data(self, *args)
FileSystemWriter.write_data = stall
main({arguments!r})
"""


def test_kill_a_rank_during_a_save_then_resume(folder: Path, pool: RankPool) -> None:
    script = folder / "stalling.py"
    script.write_text(
        _STALLING_TRAINER.format(arguments=["train", *MICRO.split(), "--out", "killed"])
    )
    with ranks_of(script, 2) as ranks:
        deadline = time.monotonic() + 90
        while not (folder / "stalled").exists() and time.monotonic() < deadline:
            assert all(rank.is_alive() for rank in ranks), script.with_suffix(".0.err").read_text()
            time.sleep(0.05)
        ranks[1].kill()
        ranks[0].join(60)
        assert ranks[0].exitcode
    run = folder / "killed"
    assert [runs.step_of(c) for c in runs.complete_checkpoints(run)] == [2]
    assert [p.name for p in runs.leftovers(run)] == [".step-00000004.tmp"]

    pool.run(train_here, str(folder), "--resume killed")
    assert runs.leftovers(run) == []
    assert [runs.step_of(c) for c in runs.complete_checkpoints(run)] == [4, 6]
    assert curve(run) == curve(folder / "whole")


def mesh_of(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--tp 2", "--mode hybrid_shard --shard-size 2"])
def test_resumes_on_four_ranks(folder: Path, pools: Any, layout: str) -> None:
    whole = folder / "whole"
    fork = f"four{layout.replace(' ', '')}"
    checkpoint = runs.step_folder(whole, 4)
    pools(4).run(train_here, str(folder), f"--resume {checkpoint} {layout} --out {fork}")
    ours, theirs = curve(folder / fork), curve(whole)[4:]
    assert [step for step, *_ in ours] == [5, 6]
    for (_, *got), (_, *wanted) in zip(ours, theirs, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
