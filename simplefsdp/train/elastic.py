"""A run whose number of ranks changes, under torchrun's elastic launcher.

When a rank is lost or comes back, torchrun restarts all ranks, as many as there are then, and each
start resumes the last checkpoint. The global batch stays the same: a rank computes no more of it at
once than it did before, and accumulates gradients over more micro-batches. With fewer ranks, each
holds more of the parameters and of the optimizer's state. With ``--microbatch-size auto``, what
fits beside them is therefore predicted again at each start; a number is kept.

torchrun (2.11 to 2.15) lets a machine join later only where ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``
is 1. Otherwise the first machine gives newcomers no address, and all fail after a minute.
"""

import os
from dataclasses import dataclass, replace

from simplefsdp.train.config import TrainConfig


@dataclass(frozen=True)
class Batch:
    """A global batch of ``sequences``, divided among data-parallel ``ranks``. Each rank cuts its
    part into ``microbatches``. ``notice`` is a line for the user if the batch had to be changed.
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
    """Divide the global batch of ``config`` among ``ranks`` data-parallel ranks.

    No rank computes more than ``microbatch_size`` sequences at once. A batch that does not divide
    evenly is made smaller. If it has fewer sequences than there are ranks, each rank gets one.
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
    """``config`` with the micro-batch size as a number, so that any number of ranks can resume it.

    ``auto`` stays: with another number of ranks, another size fits.
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
