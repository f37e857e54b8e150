"""Log lines that hold for all ranks: rank 0 logs them at INFO, the other ranks at DEBUG."""

from __future__ import annotations

import logging

import torch.distributed as dist

log = logging.getLogger("simplefsdp")


def say(message: str, *args: object) -> None:
    """Log a message that holds for all ranks, at :func:`level`."""
    log.log(level(), message, *args)


def level() -> int:
    """INFO on rank 0, and DEBUG on the others."""
    return logging.INFO if speaks() else logging.DEBUG


def speaks() -> bool:
    """Whether this rank speaks for all ranks: it is rank 0, or there is no process group."""
    return not dist.is_initialized() or dist.get_rank() == 0
