"""The checks that can refuse a run: in a launcher before it starts ranks, and then on rank 0.

Code that reads checkpoints, or that predicts memory, is imported only if a run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simplefsdp.launcher.errors import user_errors
from simplefsdp.launcher.ranks import device_type
from simplefsdp.models import config_of
from simplefsdp.models.build import plain_model
from simplefsdp.models.layout import RankLayout, plan_layout
from simplefsdp.train import elastic, runs
from simplefsdp.train.config import TrainConfig, check_options
from simplefsdp.train.data import PROMPT_NBYTES, Corpus, ShardedBatches, load_corpus
from simplefsdp.train.elastic import Batch
from simplefsdp.train.room import check_room, nbytes_of_model

if TYPE_CHECKING:
    from simplefsdp.models.llama3 import Llama
    from simplefsdp.train.restore import Checkpoint


@dataclass(frozen=True)
class RunPlan:
    """What the checks settle; rank 0 decides it once for all ranks."""

    config: TrainConfig  # of this session, with nothing left to look up
    saved: TrainConfig  # what checkpoints keep, which fits any number of ranks
    layout: RankLayout
    batch: Batch
    out: Path  # the run folder
    checkpoint: Checkpoint | None  # where to resume from
    corpus_fingerprint: str  # of the text that was checked; every rank must read the same
    checkpoint_nbytes: int  # of the tensors of one checkpoint; 0 if this run saves none

    @property
    def first_step(self) -> int:
        """Updates done before this session."""
        return self.checkpoint.trainer.step if self.checkpoint and self.checkpoint.trainer else 0

    @property
    def finished(self) -> bool:
        """Whether there is no step left to do."""
        return self.first_step >= self.config.last_step


def make_layout(config: TrainConfig, world_size: int, node_ranks: int) -> RankLayout:
    """Check the options that need neither files nor ranks, and lay out the ranks.

    ``node_ranks`` is the number of ranks on a node; ``hybrid_shard`` shards within it by default.
    A UserError says which option does not fit.
    """
    with user_errors():
        check_options(config)
        model = config_of(config.model.model)
        layout = plan_layout(config.parallel, world_size, node_ranks)
        if model.n_kv_heads % layout.tp:
            raise ValueError(
                f"--tp {layout.tp} does not divide the {model.n_kv_heads} key/value heads of "
                f"--model {config.model.model}"
            )
        return layout


def plan_run(
    config: TrainConfig, world_size: int, node_ranks: int, *, fits: bool = True
) -> RunPlan:
    """Check a run against its model, its data and its run folder, and settle what was left open.

    ``fits=False`` leaves ``--microbatch-size auto`` open, for rank 0 to settle: that prediction
    takes seconds.

    Raises:
        UserError: something is wrong; nothing has been written or started.
    """
    layout = make_layout(config, world_size, node_ranks)
    with user_errors():
        batch = _check_batch(config, layout)
        corpus = load_corpus(config.data.data)
        train = batches(config, corpus, batch)
        try:
            if len(corpus.validation) < PROMPT_NBYTES:
                raise ValueError(f"{len(corpus.validation)} bytes are too few: use more data")
            batches(config, corpus, batch, held_out=True)
        except ValueError as error:
            raise ValueError(f"held-out split: {error}") from error
        out = config.run.out or runs.new_run_folder(config.model.model)
        resumed = Path(config.run.resume) if config.run.resume else None
        runs.check_out(out, resumed)
        model = plain_model(config.model)
        checkpoint = _checkpoint_of(resumed, model, config) if resumed else None
        if checkpoint and checkpoint.trainer:
            train.load_state_dict(checkpoint.trainer.data)
        plan = RunPlan(
            config=config,
            saved=elastic.for_any_ranks(config, layout.dp),
            layout=layout,
            batch=batch,
            out=out,
            checkpoint=checkpoint,
            corpus_fingerprint=corpus.fingerprint,
            checkpoint_nbytes=nbytes_of_model(model) if config.run.checkpoint_every else 0,
        )
        if plan.checkpoint_nbytes and not plan.finished:
            check_room(out, plan.checkpoint_nbytes)
        if fits and config.optim.microbatch_size == "auto" and not plan.finished:
            # The prediction takes seconds, so it comes after the checks that refuse at once.
            from simplefsdp.train.fit import fitted

            fitting = fitted(config, layout, device_type())
            limit = fitting.optim.microbatch_limit
            saved = replace(config, optim=replace(config.optim, microbatch_limit=limit))
            batch = elastic.divide(fitting, layout.dp)
            plan = replace(plan, config=fitting, saved=saved, batch=batch)
    return plan


def _checkpoint_of(path: Path, model: Llama, config: TrainConfig) -> Checkpoint:
    from simplefsdp.train.restore import check_model, open_checkpoint

    checkpoint = open_checkpoint(path)
    check_model(checkpoint, model, config.model.model)
    return checkpoint


def _check_batch(config: TrainConfig, layout: RankLayout) -> Batch:
    """How the global batch is divided, or a ValueError if a sequence or the batch does not fit."""
    longest = config_of(config.model.model).max_seq_len
    if config.data.seq_len > longest:
        raise ValueError(
            f"--seq-len {config.data.seq_len} is beyond the {longest} positions of "
            f"--model {config.model.model}"
        )
    sequences, ranks = config.data.global_batch_size, layout.dp
    batch = elastic.divide(config, ranks)
    if batch.notice and not (config.run.resume or elastic.restarts()):
        lower = sequences // ranks * ranks
        nearest = f"{lower} or {lower + ranks}" if lower else f"{ranks}"
        raise ValueError(
            f"global batch of {sequences} sequences does not divide among {ranks} "
            f"data-parallel ranks: use {nearest}"
        )
    count = config.optim.gradient_accumulation_steps
    if count and not batch.notice and sequences // ranks % count:
        raise ValueError(
            f"--gradient-accumulation-steps {count} does not divide the {sequences // ranks} "
            f"sequences that each of {ranks} data-parallel ranks has of --global-batch-size "
            f"{sequences}"
        )
    return batch


def batches(
    config: TrainConfig, corpus: Corpus, batch: Batch, dp_rank: int = 0, *, held_out: bool = False
) -> ShardedBatches:
    """The batches of one data-parallel rank, from the beginning.

    ``held_out`` batches, which evaluations read, are the same for every seed.
    """
    return ShardedBatches(
        corpus.validation if held_out else corpus.train,
        seq_len=config.data.seq_len,
        global_batch_size=batch.sequences,
        rank=dp_rank,
        world_size=batch.ranks,
        seed=0 if held_out else config.optim.seed,
        fingerprint=corpus.fingerprint,
    )
