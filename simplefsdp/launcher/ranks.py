"""Ranks and devices: which rank this process is, and what rank 0 decides for all ranks.

Launchers import this file, too. Modules that only a rank needs are imported where they are used:
importing torch's compiler takes more than a second, before any rank is started.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from simplefsdp.launcher.errors import EXIT_BAD_INPUT, UserError
from simplefsdp.words import plural

T = TypeVar("T")
_TIMEOUT_S = 1800.0
_RANK_ZERO_SPEAKS_S = 2.0


@dataclass(frozen=True)
class Rank:
    """This process among the ranks."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def local_size(self) -> int:
        """Ranks on this node, as the launcher has set them; else the number of all ranks."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))


def device_type() -> str:
    """``cuda`` if there is a CUDA device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_ranks() -> int:
    """Local ranks started when none are asked for: every GPU, or two on CPU."""
    return torch.cuda.device_count() if device_type() == "cuda" else 2


def _timeout() -> timedelta:
    """How long a rank waits for the others in a collective."""
    from simplefsdp.rank_guard import waiting_s

    return timedelta(seconds=waiting_s(_TIMEOUT_S))


@contextmanager
def join_ranks() -> Iterator[Rank]:
    """Join the ranks that torchrun's environment variables describe; leave them at the end.

    The backend is gloo on CPU. On CUDA it is NCCL with streams of high priority, which the groups
    of a mesh inherit, because torch splits them from this group. A collective without an answer
    from other ranks fails after half an hour, or after SIMPLEFSDP_TIMEOUT_S seconds. Raises a
    ValueError if this node has fewer devices than ranks.
    """
    from simplefsdp._torch import high_priority, mend_gloo_gathers

    mend_gloo_gathers()  # for gathers without a wrapped model
    device, timeout = local_device(), _timeout()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
        pg_options=high_priority(backend, timeout),
    )
    yield Rank(dist.get_rank(), dist.get_world_size(), device)
    # This is not done after an error: other ranks may be inside a collective, and it would wait.
    dist.destroy_process_group()


def group_of(ranks: list[int]) -> Any:
    """A process group of some ranks, set up like the default group; every rank must call this."""
    from simplefsdp._torch import high_priority

    timeout = _timeout()
    options = high_priority(dist.get_backend_config(), timeout)
    return dist.new_group(ranks, timeout=timeout, pg_options=options)


def from_rank_zero(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def on_rank_zero(rank: Rank, decide: Callable[[], T]) -> T:
    """Rank 0's decision, on every rank: for questions that ranks could answer differently, because
    their clocks or file systems may differ.

    If ``decide`` raises a UserError, rank 0 raises it, and the other ranks exit silently.
    """
    decided: Any = None
    if rank.rank == 0:
        try:
            decided = decide()
        except UserError as error:
            decided = error
    decided = from_rank_zero(decided)
    if isinstance(decided, UserError):
        refuse(rank, str(decided))
    return decided


def refuse(rank: Rank, why: str) -> NoReturn:
    """End all ranks, each of which must call this: rank 0 with a UserError, the others silently.

    A launcher ends the other ranks as soon as one has ended, so rank 0 ends first.
    """
    if rank.rank == 0:
        raise UserError(why)
    time.sleep(_RANK_ZERO_SPEAKS_S)
    raise SystemExit(EXIT_BAD_INPUT)


def local_device() -> torch.device:
    """The device of this rank: the GPU numbered by LOCAL_RANK, or the CPU."""
    if device_type() == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    check_devices(local_rank + 1)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_devices(local_ranks: int) -> None:
    """Raise ValueError if this machine has fewer CUDA devices than ranks to run on it."""
    if device_type() == "cuda" and local_ranks > torch.cuda.device_count():
        devices = torch.cuda.device_count()
        raise ValueError(
            f"{local_ranks} local ranks, but this machine has {plural(devices, 'CUDA device')}; "
            "start at most one rank per device (--ranks or torchrun --nproc-per-node)"
        )


def cpu_count() -> int:
    """Number of cores on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world_size`` ranks, of which the others do not exist;
    collectives return at once.

    This is the one place that touches torch's private fake process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
