"""A run whose number of ranks changes, under torchrun's elastic launcher.

torchrun starts all ranks anew when one is lost or comes back, as many as there are then, and each
start resumes the last checkpoint. The global batch stays the same: a rank computes no more of it at
once than it did before, and accumulates the rest. Fewer ranks hold more of the parameters and the
optimizer's state each, so what fits beside them is predicted anew at each start (where
``--microbatch-size auto`` asks for it: a number stays what it is).

torchrun (2.11 to 2.15) lets a machine join later only where ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``
is 1: else the first machine tells newcomers no address, and all fail after a minute.
"""

import os
from dataclasses import dataclass, replace

from simplefsdp.train.config import TrainConfig


@dataclass(frozen=True)
class Batch:
    """How a global batch of ``sequences`` is divided: among data-parallel ``ranks``, each of which
    cuts its part into ``microbatches``; and what a user is to be told of it.
    """

    sequences: int
    ranks: int
    microbatches: int
    notice: str | None = None

    @property
    def at_once(self) -> int:
        """Sequences that each rank computes at once."""
        return self.sequences // self.ranks // self.microbatches


def restarts() -> int:
    """How often torchrun may start all ranks anew; 0 if they were started by something else."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def check_resumes(config: TrainConfig) -> None:
    """Raise ValueError if ranks that are started anew would not go on from the last checkpoint."""
    run = config.run
    # One checkpoint, given by name, is not the last one any more when ranks are started anew.
    if restarts() and (run.resume != "auto" or run.out is None or run.checkpoint_every == 0):
        raise ValueError(
            f"torchrun --max-restarts {restarts()}: expected --resume auto, --out and checkpoints, "
            "for ranks that are started anew to go on from the last one; got --resume "
            f"{run.resume} --out {run.out} --checkpoint-every {run.checkpoint_every}"
        )


def divide(config: TrainConfig, ranks: int) -> Batch:
    """Divide the global batch of ``config`` among so many data-parallel ranks.

    None computes more at once than ``microbatch_size``. A batch that does not divide is made
    smaller, or, if it has fewer sequences than there are ranks, one of each.
    """
    sequences, at_once = config.data.global_batch_size, _microbatch_size(config, ranks)
    own = max(1, sequences // ranks)
    count = next(n for n in range(1, own + 1) if own % n == 0 and own // n <= at_once)
    notice = None
    if own * ranks != sequences:
        notice = (
            f"global batch of {own * ranks} sequences for now: {sequences} do not divide among "
            f"{ranks} data-parallel ranks"
        )
    return Batch(own * ranks, ranks, count, notice)


def for_any_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """``config`` that says what a rank computes at once, to be saved for other numbers of ranks.

    ``auto`` stays: on other ranks something else fits.
    """
    if config.optim.microbatch_size == "auto":
        return config
    optim = replace(
        config.optim,
        gradient_accumulation_steps=None,
        microbatch_size=_microbatch_size(config, ranks),
        microbatch_limit=None,
    )
    return replace(config, optim=optim)


def _microbatch_size(config: TrainConfig, ranks: int) -> int:
    count, size = config.optim.gradient_accumulation_steps, config.optim.microbatch_size
    if count is None and isinstance(size, int):
        return size
    return max(1, config.data.global_batch_size // ranks // (count or 1))
