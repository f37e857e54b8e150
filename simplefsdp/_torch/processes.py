"""Process groups, and the dispatch modes and autograd state of the current thread."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def shared_store(prefix: str) -> Any:
    """The key-value store that all ranks of the default process group share, under ``prefix``."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


def high_priority(backend: str, timeout: timedelta) -> Any:
    """Options of a process group whose collectives go ahead of compute that is queued on the GPU.

    At the default priority of NCCL's streams, a collective waits until the thread blocks of earlier
    matmuls leave room on the GPU. FSDP2, too, uses streams of high priority. None if ``backend``,
    such as ``"cpu:gloo,cuda:nccl"``, does not name NCCL.
    """
    if "nccl" not in backend:
        return None
    from torch.distributed import ProcessGroupNCCL  # not in builds for CPU

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # the group's timeout overrides it, but torch wants them equal
    return options


# By a group, and by a number of its ranks: the name of another group with as many.
_groups_made: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def second_group(name: str) -> str:
    """Name of a second process group, with its own communicator, of the ranks of group ``name``."""
    group = _group(name)
    return _group_made(group, distributed_c10d.get_process_group_ranks(group))


def group_of_neighbours(name: str, ranks: int) -> tuple[str, int]:
    """Name of a process group of ``ranks`` neighbours in the group ``name``, this rank among them,
    and its place there. ``ranks`` divide the group: the first so many are neighbours, the next so
    many, and so on."""
    group = _group(name)
    members = distributed_c10d.get_process_group_ranks(group)
    begin, place = divmod(members.index(distributed_c10d.get_rank()), ranks)
    return _group_made(group, members[begin * ranks : (begin + 1) * ranks]), place


def ranks_per_node(ranks: int) -> int | None:
    """Ranks per node by torchrun's variables, the same on all ranks. None if the variables are not
    set, or were set for another number of ranks than this process group has (``ranks``)."""
    if os.environ.get("WORLD_SIZE", str(ranks)) != str(ranks):
        return None
    if nodes := _told("GROUP_WORLD_SIZE"):
        return -(-ranks // nodes)
    return _told("LOCAL_WORLD_SIZE") or None


def _told(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def _group(name: str) -> Any:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def _group_made(group: Any, ranks: list[int]) -> str:
    """Name of a process group of these ranks of ``group``, with its own communicator.

    The first call is collective among these ranks, and no others. So the new communicator is not
    split from that of all ranks, as torch would if ``init_process_group`` was given a
    ``device_id``: a split would wait for ranks that compile nothing, or later.
    """
    made = _groups_made.setdefault(group, {})
    if len(ranks) not in made:
        backend = distributed_c10d.get_backend_config(group)
        timeout = _timeout_of(group)
        with patch.object(distributed_c10d, "_get_split_source", lambda *args: None):
            other: Any = distributed_c10d.new_group(  # since 2.15 its type has a number in it
                ranks,
                timeout=timeout,
                backend=backend,
                pg_options=high_priority(backend, timeout),
                use_local_synchronization=True,
            )
        made[len(ranks)] = other.group_name
    return made[len(ranks)]


def _timeout_of(group: Any) -> timedelta:
    """The timeout of the collectives of ``group``; torch's default if the group does not tell."""
    backends = (group._get_backend(device) for device in group._device_types)
    told = [getattr(getattr(b, "options", None), "_timeout", None) for b in backends]
    default = distributed_c10d._get_default_timeout(distributed_c10d.get_backend(group))
    return max((timeout for timeout in told if timeout is not None), default=default)


def hold_up_stream() -> None:
    """Keep the current CUDA stream busy for about a millisecond, without blocking the host."""
    torch.cuda._sleep(2_000_000)  # cycles


def is_checkpointed_by_hooks(module: nn.Module) -> bool:
    """Whether somebody gave ``module`` to ``torch.distributed._composable.checkpoint``."""
    from torch.distributed._composable.contract import _get_registry

    return "checkpoint" in (_get_registry(module) or {})


def in_backward() -> bool:
    """Whether this thread runs inside autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def dispatch_mode() -> str | None:
    """Class name of the user's innermost dispatch mode, or None. In such a mode Dynamo does not
    compile."""
    users = [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    return type(users[-1]).__name__.lstrip("_") if users else None


def no_torch_function() -> AbstractContextManager[None]:
    """Inside, ``__torch_function__`` of tensor subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]
