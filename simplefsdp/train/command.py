"""``simplefsdp train``: from the command line to ranks that train."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from simplefsdp.choices import with_default
from simplefsdp.launcher.errors import UserError, user_errors
from simplefsdp.launcher.follow import follow_launcher, under_torchrun
from simplefsdp.launcher.importing import importing
from simplefsdp.train import elastic, runs
from simplefsdp.train.config import TrainConfig

if TYPE_CHECKING:
    from simplefsdp.train.preflight import RunPlan

_DRY_RUN_NODE_RANKS = 8

_DESCRIPTION = """Train a Llama 3 under SimpleFSDP.

Without a launcher it starts its own local ranks; under torchrun it joins the ranks it is given.

examples:
  simplefsdp train
  simplefsdp train --data benchmarks --steps 30 --out runs/benchmarks
  simplefsdp train --resume
  simplefsdp train --steps 40 --stop-after 20 --out runs/halves
  simplefsdp train --resume runs/halves
  simplefsdp train --ranks 4 --mode hybrid_shard --shard-size 2
  simplefsdp train --model 8b --dry-run --world-size 64
  torchrun --nproc-per-node 8 -m simplefsdp train --model 8b --seq-len 8192 \\
      --activation-checkpointing selective --lr 3e-4 --steps 1000 --out runs/8b --resume auto
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --max-restarts 100 \\
      --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id 8b \\
      -m simplefsdp train --model 8b --out runs/8b --resume auto
"""


def run(args: list[str]) -> int:
    """Run ``simplefsdp train *args``; return the exit code."""
    if under_torchrun():
        return _run_rank(args)
    config = parse(args)
    if config.plan.dry_run:
        return _dry_run(config)
    with importing():
        from simplefsdp.launcher import launch
        from simplefsdp.launcher.ranks import check_devices, default_ranks
        from simplefsdp.train.preflight import plan_run

    ranks = config.parallel.ranks or default_ranks()
    with user_errors():
        check_devices(ranks)
    plan = plan_run(config, ranks, node_ranks=ranks, fits=False)
    if plan.finished:
        return _say_finished(plan)
    try:
        (plan.out / runs.LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {plan.out}: cannot make the folder: {error.strerror}") from error
    # The ranks are told what was settled here: the default folder is named by the time, so they
    # would choose another one.
    settled = ["--out", str(plan.out)]
    settled += ["--resume", str(plan.checkpoint.path) if plan.checkpoint else "None"]
    there = runs.complete_checkpoints(plan.out)
    return launch.start_local_ranks(
        ["train", *args, *settled],
        ranks=ranks,
        log_folder=plan.out / runs.LOGS,
        go_on=lambda: runs.how_to_go_on(plan.out),
        on_signal=partial(_say_unsaved, plan.out, there)
        if config.run.checkpoint_every
        else lambda name: None,
    )


def _say_unsaved(out: Path, there: list[Path], signal: str) -> None:
    """Say how to go on after a signal, unless the ranks have saved a checkpoint since the start.

    Ranks do not handle signals before their first report: until then a signal just ends them.
    """
    with suppress(OSError):
        if runs.complete_checkpoints(out) != there:
            return
        go_on = runs.how_to_go_on(out) or "start it again"
        print(f"stopped by {signal} before a checkpoint was saved; {go_on}", file=sys.stderr)


def parse(args: list[str]) -> TrainConfig:
    """Read the options; those not given are taken from the resumed run, if there is one.

    In the result ``run.resume`` is the folder of one checkpoint, or None.

    Raises:
        UserError: ``--resume`` names nothing to resume from.
        SystemExit: the options cannot be read (code 2), or ``--help`` was shown (0).
    """
    args = with_default(args, "--resume", "latest")
    config = _read(args, TrainConfig())
    with user_errors():
        elastic.check_resumes(config)
        checkpoint = runs.find_checkpoint(config.run.resume, config.run.out)
        trainer = runs.read_trainer_state(checkpoint) if checkpoint else None
    if checkpoint and trainer:
        saved = TrainConfig.from_json(trainer.config)
        default = replace(saved, run=replace(saved.run, out=runs.run_of(checkpoint)))
        config = _read(args, default)
    resume = str(checkpoint) if checkpoint else None
    return replace(config, run=replace(config.run, resume=resume))


def _read(args: list[str], default: TrainConfig) -> TrainConfig:
    import tyro

    return tyro.cli(
        TrainConfig,
        prog="simplefsdp train",
        description=_DESCRIPTION,
        args=args,
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _run_rank(args: list[str]) -> int:
    """Be one rank of a run: agree on the plan, then train."""
    with importing():
        from simplefsdp.launcher.ranks import join_ranks, on_rank_zero
        from simplefsdp.train.build import telling_flags
        from simplefsdp.train.loop import train
        from simplefsdp.train.preflight import plan_run

    follow_launcher()
    with user_errors(), ExitStack() as stack:
        rank = stack.enter_context(join_ranks())

        def decide() -> RunPlan:
            config = parse(args)
            if config.plan.dry_run:
                raise UserError("--dry-run starts no ranks: run it without torchrun")
            plan = plan_run(config, rank.world_size, node_ranks=rank.local_size)
            if not plan.finished:
                stack.enter_context(runs.lock(plan.out))
            return plan

        plan = on_rank_zero(rank, decide)
        leave = stack.pop_all()
    with leave, telling_flags():
        if plan.finished:
            return _say_finished(plan) if rank.rank == 0 else 0
        return train(plan, rank)


def _say_finished(plan: RunPlan) -> int:
    print(
        f"nothing to do: {plan.out} is at step {plan.first_step} of {plan.config.last_step}; "
        "give more --steps to train on (which stretches the schedule, too)"
    )
    return 0


def _dry_run(config: TrainConfig) -> int:
    from simplefsdp.launcher.ranks import default_ranks
    from simplefsdp.train.dry_run import plan_memory, print_plan
    from simplefsdp.train.fit import fitted
    from simplefsdp.train.preflight import make_layout

    world_size = config.plan.world_size or config.parallel.ranks or default_ranks()
    layout = make_layout(config, world_size, min(world_size, _DRY_RUN_NODE_RANKS))
    with user_errors():
        if config.compile.cluster is None and config.optim.microbatch_size == "auto":
            raise ValueError("--dry-run --microbatch-size auto: give --cluster: on what?")
        config = fitted(config, layout, "cuda")  # a dry run plans for GPUs
        plan = plan_memory(config, layout)
    print_plan(config, layout, plan)
    return 0
