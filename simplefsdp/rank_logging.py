"""Log lines that hold for all ranks: rank 0 tells them, the others only to who looks closer."""

from __future__ import annotations

import logging

import torch.distributed as dist

log = logging.getLogger("simplefsdp")


def say(message: str, *args: object) -> None:
    """Log for all ranks, at :func:`level`."""
    log.log(level(), message, *args)


def level() -> int:
    """INFO on rank 0, and DEBUG on the others."""
    return logging.INFO if speaks() else logging.DEBUG


def speaks() -> bool:
    """Whether this rank tells what holds for all: rank 0 does."""
    return not dist.is_initialized() or dist.get_rank() == 0
