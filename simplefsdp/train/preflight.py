"""Everything that can be refused before a rank is started, or before the others wait for it.

What reads checkpoints, and what predicts memory, is imported where a run asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simplefsdp.launcher.errors import user_errors
from simplefsdp.launcher.ranks import device_type
from simplefsdp.models import LlamaConfig, config_of
from simplefsdp.models.build import plain_model
from simplefsdp.models.layout import RankLayout, plan_layout
from simplefsdp.train import elastic, runs
from simplefsdp.train.config import TrainConfig, check_options
from simplefsdp.train.data import PROMPT_NBYTES, Corpus, ShardedBatches, load_corpus
from simplefsdp.train.room import check_room, nbytes_of_model

if TYPE_CHECKING:
    from simplefsdp.models.llama3 import Llama
    from simplefsdp.train.restore import Checkpoint


@dataclass(frozen=True)
class RunPlan:
    """What the checks settle; decided once, then the same on every rank.

    Attributes:
        config: the options of this session, with nothing left to look up.
        saved: those that checkpoints keep, which fit any number of ranks.
        layout: how the ranks are laid out.
        out: the run folder.
        checkpoint: where to resume from, or None.
        corpus_fingerprint: the text that was checked; every rank must read the same.
        checkpoint_nbytes: of one that this run saves; 0 if it saves none.
        notice: what a user is to be told of the batches, or None.
    """

    config: TrainConfig
    saved: TrainConfig
    layout: RankLayout
    out: Path
    checkpoint: Checkpoint | None
    corpus_fingerprint: str
    checkpoint_nbytes: int
    notice: str | None

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

    ``node_ranks`` is how many ranks share a node: the default group of ``hybrid_shard``.

    Raises:
        UserError: an option is wrong or does not fit the model or the number of ranks.
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

    ``fits=False`` leaves ``--microbatch-size auto`` open, for rank 0 to settle: that takes seconds.

    Raises:
        UserError: something is wrong; nothing has been written or started.
    """
    layout = make_layout(config, world_size, node_ranks)
    with user_errors():
        _check_sequence(config, config_of(config.model.model))
        _check_microbatches(config, layout)
        divided = _divided(config, layout)
        corpus = load_corpus(config.data.data)
        batches(divided.config, corpus, layout, dp_rank=0)
        try:
            held_out_batches(divided.config, corpus, layout, dp_rank=0)
        except ValueError as error:
            raise ValueError(f"held-out split: {error}") from error
        out = config.run.out or runs.new_run_folder(config.model.model)
        resumed = Path(config.run.resume) if config.run.resume else None
        runs.check_out(out, resumed)
        model = plain_model(config.model)
        checkpoint = _checkpoint_of(resumed, model, config) if resumed else None
        if checkpoint and checkpoint.trainer:
            data = checkpoint.trainer.data
            batches(divided.config, corpus, layout, dp_rank=0).load_state_dict(data)
        nbytes = nbytes_of_model(model) if config.run.checkpoint_every else 0
        plan = RunPlan(
            divided.config,
            divided.saved,
            layout,
            out,
            checkpoint,
            corpus.fingerprint,
            nbytes,
            divided.notice,
        )
        if nbytes and not plan.finished:
            check_room(out, nbytes)
        if fits and config.optim.microbatch_size == "auto" and not plan.finished:
            # It takes seconds: after all that is refused at once.
            from simplefsdp.train.fit import fitted

            fitting = fitted(config, layout, device_type())
            limit = fitting.optim.microbatch_limit
            saved = replace(config, optim=replace(config.optim, microbatch_limit=limit))
            plan = replace(plan, **_divided(fitting, layout)._replace(saved=saved)._asdict())
    return plan


def _checkpoint_of(path: Path, model: Llama, config: TrainConfig) -> Checkpoint:
    from simplefsdp.train.restore import check_model, open_checkpoint

    checkpoint = open_checkpoint(path)
    check_model(checkpoint, model, config.model.model)
    return checkpoint


class _Divided(NamedTuple):
    """What a run's batches are on its ranks: parts of a :class:`RunPlan`."""

    config: TrainConfig
    saved: TrainConfig
    notice: str | None


def _divided(config: TrainConfig, layout: RankLayout) -> _Divided:
    saved = elastic.for_any_ranks(config, layout.dp)
    batch = elastic.divide(config, layout.dp)
    if batch.notice is None or config.run.resume or elastic.restarts():
        return _Divided(elastic.for_these_ranks(config, batch), saved, batch.notice)
    return _Divided(config, saved, None)


def _check_sequence(config: TrainConfig, model: LlamaConfig) -> None:
    if config.data.seq_len > model.max_seq_len:
        raise ValueError(
            f"--seq-len {config.data.seq_len} is beyond the {model.max_seq_len} positions of "
            f"--model {config.model.model}"
        )


def _check_microbatches(config: TrainConfig, layout: RankLayout) -> None:
    count, sequences = config.optim.gradient_accumulation_steps, config.data.global_batch_size
    if count and sequences % layout.dp == 0 and sequences // layout.dp % count:
        raise ValueError(
            f"--gradient-accumulation-steps {count} does not divide the {sequences // layout.dp} "
            f"sequences that each of {layout.dp} data-parallel ranks has of --global-batch-size "
            f"{sequences}"
        )


def batches(
    config: TrainConfig, corpus: Corpus, layout: RankLayout, dp_rank: int
) -> ShardedBatches:
    """The training batches of one data-parallel rank, from the beginning."""
    return ShardedBatches(
        corpus.train,
        seq_len=config.data.seq_len,
        global_batch_size=config.data.global_batch_size,
        rank=dp_rank,
        world_size=layout.dp,
        seed=config.optim.seed,
        fingerprint=corpus.fingerprint,
    )


def held_out_batches(
    config: TrainConfig, corpus: Corpus, layout: RankLayout, dp_rank: int
) -> ShardedBatches:
    """The batches every evaluation uses: always the same ones, whatever the seed."""
    if len(corpus.validation) < PROMPT_NBYTES:
        raise ValueError(f"{len(corpus.validation)} bytes are too few: use more data")
    return ShardedBatches(
        corpus.validation,
        seq_len=config.data.seq_len,
        global_batch_size=config.data.global_batch_size,
        rank=dp_rank,
        world_size=layout.dp,
        seed=0,
        fingerprint=corpus.fingerprint,
    )
