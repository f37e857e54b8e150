"""All-gathers of CPU tensors over gloo, by a code path that does not corrupt memory.

Functional all-gathers end in ``ProcessGroupGloo::allgather_coalesced``. If several are in flight, a
rank may die of SIGSEGV or "double free or corruption", or hang: seldom in training, but within
seconds if nothing else is done. ``benchmarks/gloo_gathers.py`` shows it with torch alone.
``ProcessGroupGloo::allgather``, which FSDP2 uses, does not do that. So for groups that use gloo for
CPU tensors, both functional all-gather operators are routed there; complex numbers go as pairs of
real ones. Lists of several dtypes, which we never gather, are left to torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OPERATORS = "_c10d_functional"
_ops: Any = getattr(torch.ops, _OPERATORS)


@cache
def mend_gloo_gathers() -> torch.library.Library:
    """Route the functional all-gathers of this process to the safe path over gloo; done once."""
    library = torch.library.Library(_OPERATORS, "IMPL")
    _override(library, "all_gather_into_tensor", _gather)
    _override(library, "all_gather_into_tensor_coalesced", _gather_coalesced)
    return library  # the cache keeps the library alive, and the library its kernels


def _override(library: torch.library.Library, name: str, safe: Callable[..., Any]) -> None:
    """Give operator ``name`` the kernel ``safe`` for gloo; other calls go to torch's kernel."""
    before = torch.library.get_kernel(f"{_OPERATORS}::{name}", "CPU")

    def kernel(keys: Any, gathered: Any, ranks: int, group: Any) -> Any:
        tensors = [gathered] if isinstance(gathered, Tensor) else gathered
        if len({t.dtype for t in tensors}) != 1 or not _uses_gloo(group):
            return before.call_boxed(keys, gathered, ranks, group)
        with torch.no_grad():
            if not tensors[0].is_complex():
                return safe(gathered, ranks, group)
            found = safe(tree_map_only(Tensor, _as_real, gathered), ranks, group)
            return tree_map_only(Tensor, torch.view_as_complex, found)

    library.impl(name, kernel, "CPU", with_keyset=True)


def _as_real(shard: Tensor) -> Tensor:
    return torch.view_as_real(torch.atleast_1d(shard).resolve_conj())


def _uses_gloo(group: Any) -> bool:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    try:
        return "cpu:gloo" in dist.get_backend_config(group)
    except (TypeError, ValueError):  # made neither by init_process_group nor by new_group
        return False


def _gather(shard: Tensor, ranks: int, group: Any) -> Tensor:
    if shard.dim() == 0:
        shard = shard.view(1)
    return _ops.all_gather_into_tensor_out(
        shard.contiguous(), ranks, group, out=_room(shard, ranks)
    )


def _gather_coalesced(shards: list[Tensor], ranks: int, group: Any) -> list[Tensor]:
    """Gather all shards as one flat buffer: gloo takes most of a millisecond for each gather."""
    if len(shards) == 1:
        return [_gather(shards[0], ranks, group)]
    flat = _gather(torch.cat([shard.reshape(-1) for shard in shards]), ranks, group)
    transfer = _Transfer(flat)
    sizes = [shard.numel() for shard in shards]
    columns = flat.view(ranks, sum(sizes)).split(sizes, dim=1)
    full = [_room(shard, ranks) for shard in shards]
    for part, its in zip(full, columns, strict=True):
        work = _Copy(transfer, its, part)
        torch._C._distributed_c10d._register_work(part, work)  # type: ignore[attr-defined]
    return full


def _room(shard: Tensor, ranks: int) -> Tensor:
    """An empty tensor for the shards of all ranks, one after the other."""
    rows, *rest = shard.shape or (1,)
    return shard.new_empty((ranks * rows, *rest))


class _Transfer:
    """A gather that several tensors wait for; if it fails, waiting for each of them raises."""

    def __init__(self, flat: Tensor) -> None:
        self._flat: Tensor | None = flat
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._flat is not None:
                try:
                    _ops.wait_tensor(self._flat)
                except Exception as error:
                    self._error = error
                self._flat = None
        if self._error is not None:
            raise self._error


class _Copy(dist.Work):
    """The work that ``wait_tensor`` waits for: a transfer, then the copy of one tensor from it."""

    def __init__(self, transfer: _Transfer, arrived: Tensor, full: Tensor) -> None:
        super().__init__()
        self._transfer = transfer
        self._arrived = arrived
        self._full = full

    def wait(self, timeout: Any = None) -> bool:  # the group's timeout holds
        self._transfer.wait()
        with torch.inference_mode():  # the tensor may have been made in inference mode
            self._full.view(self._arrived.shape).copy_(self._arrived)
        return True
