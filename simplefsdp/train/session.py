"""What one rank holds while it trains, and how it is set up: new, or from a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from simplefsdp.checkpoints.opened import verify
from simplefsdp.frontend.initialize import init_weights
from simplefsdp.launcher.errors import UserError, user_errors
from simplefsdp.launcher.launch import StopRequest
from simplefsdp.launcher.ranks import Rank, refuse
from simplefsdp.models import config_of, num_parameters
from simplefsdp.models.build import wrapped_model
from simplefsdp.models.layout import make_mesh
from simplefsdp.train import preflight, room, runs
from simplefsdp.train.build import loss_of, make_optimizer, step_of
from simplefsdp.train.checkpoint import CheckpointWriter
from simplefsdp.train.data import Corpus, ShardedBatches, load_corpus
from simplefsdp.train.display import Display, open_display
from simplefsdp.train.metrics import MetricsWriter
from simplefsdp.train.preflight import RunPlan
from simplefsdp.train.restore import Checkpoint, load_rng_state, load_training_state
from simplefsdp.train.state import seed_rng
from simplefsdp.words import plural


@dataclass
class Session:
    """One rank's part of a run.

    Training calls ``loss`` with tokens and targets; it contains ``model``, which everything else
    calls. ``whole_step``, if not None, is called instead of ``loss`` for the last micro-batch.
    ``dp_rank`` selects the part of a global batch that this rank reads; the ranks of one
    tensor-parallel group read the same part. ``step`` counts updates done; ``stopped_by`` is the
    signal that all ranks agreed to stop for, or 0.
    """

    plan: RunPlan
    rank: Rank
    corpus: Corpus
    dp_rank: int
    model: nn.Module
    loss: Any
    whole_step: Any
    optimizer: torch.optim.AdamW
    batches: ShardedBatches
    checkpoints: CheckpointWriter
    display: Display
    metrics: MetricsWriter | None
    step: int
    stop: StopRequest = field(default_factory=StopRequest)
    stopped_by: int = 0


@contextmanager
def open_session(plan: RunPlan, rank: Rank) -> Iterator[Session]:
    """Build everything; at the end, close the files and the display."""
    config = plan.config
    leads = rank.rank == 0
    with open_display(plan.first_step, config.last_step, enabled=leads) as display:
        _describe(plan, rank, display)
        corpus = _load_corpus(plan, rank)
        mesh = make_mesh(plan.layout, config.parallel, rank.device.type)
        with user_errors():
            model = wrapped_model(config.model, config.parallel, mesh)
        init_weights(model, device=rank.device, seed=config.optim.seed)
        seed_rng(config.optim.seed, rank.rank)
        metrics = MetricsWriter(plan.out, plan.first_step, display.say) if leads else None
        optimizer = make_optimizer(model, config.optim)
        dp_rank = rank.rank // plan.layout.tp
        session = Session(
            plan=plan,
            rank=rank,
            corpus=corpus,
            dp_rank=dp_rank,
            model=model,
            loss=loss_of(model, config.compile),
            whole_step=step_of(model, optimizer, config, plan.batch.microbatches),
            optimizer=optimizer,
            batches=preflight.batches(config, corpus, plan.batch, dp_rank),
            checkpoints=CheckpointWriter(
                plan.out, config.run.keep, rank.device, plan.checkpoint_nbytes, display.say
            ),
            display=display,
            metrics=metrics,
            step=plan.first_step,
        )
        if plan.checkpoint:
            _restore(session, plan.checkpoint)
        try:
            yield session
        finally:
            session.stop.close()
            if metrics:
                metrics.close()


def _describe(plan: RunPlan, rank: Rank, display: Display) -> None:
    config, layout = plan.config, plan.layout
    n_parameters = num_parameters(config_of(config.model.model))
    display.say(
        f"{config.model.model}: {n_parameters / 1e6:,.1f} M parameters, "
        f"{config.parallel.mode} on "
        f"{plural(rank.world_size, f'{rank.device.type} rank')} "
        f"(replicate {layout.replicate} x shard {layout.shard} x tp {layout.tp})"
    )
    display.say(f"run folder: {plan.out}")
    if plan.checkpoint_nbytes and rank.rank == 0:
        try:
            there = len(runs.complete_checkpoints(plan.out))
            short = room.warning(plan.out, plan.checkpoint_nbytes, config.run.keep, there)
        except OSError as error:  # only rank 0 looks: if it raised, the others would wait for it
            short = f"warning: whether the disk has room for checkpoints cannot be seen: {error}"
        if short:
            display.say(short)
    if plan.batch.notice:
        display.say(plan.batch.notice)


@contextmanager
def _all_or_none(rank: Rank) -> Iterator[None]:
    """If the code inside fails on one rank, all ranks exit, and rank 0 says why."""
    problem = None
    try:
        with user_errors():
            yield
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * rank.world_size
    dist.all_gather_object(problems, problem)
    first = next((r for r, told in enumerate(problems) if told), None)
    if first is not None:
        everywhere = len({*problems}) == 1
        refuse(rank, f"{'' if everywhere else f'rank {first}: '}{problems[first]}")


def _load_corpus(plan: RunPlan, rank: Rank) -> Corpus:
    """Read the corpus; all ranks exit if it is not the same on every rank."""
    with _all_or_none(rank):
        corpus = load_corpus(plan.config.data.data)
        if corpus.fingerprint != plan.corpus_fingerprint:
            raise ValueError(
                f"{corpus.name} is not the same text as on rank 0; give every node the same --data "
                "(and, for the default text, the same Python release)"
            )
    return corpus


def _restore(session: Session, checkpoint: Checkpoint) -> None:
    say, busy, rank = session.display.say, session.display.busy, session.rank
    with _all_or_none(rank):
        note = verify(checkpoint.files, lambda n, of: busy(f"verifying: {n / of:.0%}"))
        if note:
            say(f"warning: {note}")
        had_optimizer = load_training_state(checkpoint, session.model, session.optimizer)
    trainer = checkpoint.trainer
    if trainer is None:
        say(
            f"weights {'and optimizer state ' if had_optimizer else ''}from {checkpoint.path}, "
            "which no simplefsdp trainer wrote: starting at step 0"
        )
        return
    session.batches.load_state_dict(trainer.data)
    if trainer.world_size == rank.world_size:
        with _all_or_none(rank):
            load_rng_state(checkpoint, rank.rank, rank.device)
        say(f"resumed {checkpoint.path} exactly, at step {trainer.step}")
    else:
        say(
            f"resumed {checkpoint.path} at step {trainer.step}; random states are seeded anew, "
            f"because {trainer.world_size} ranks saved them and {rank.world_size} run now"
        )
