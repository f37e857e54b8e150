"""All-gathers of CPU tensors over gloo, on a way on which torch does not corrupt memory.

Functional all-gathers end in ``ProcessGroupGloo::allgather_coalesced``, which frees or overwrites
memory of its own while it runs: a rank dies by SIGSEGV or "double free or corruption", or waits
for ever, once in 10,000 to 1,000,000 gathers. ``benchmarks/gloo_gathers.py`` shows it with torch
alone, 2.14 and 2.15. ``ProcessGroupGloo::allgather``, which FSDP2 takes, does not do that; so the
two operators are led there, for tensors on the CPU and groups that use gloo for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATORS = "_c10d_functional"


@cache
def mend_gloo_gathers() -> torch.library.Library:
    """Lead the functional all-gathers of this process to what is safe over gloo; done once.

    Returns what holds the kernels: they go when it does.
    """
    library = torch.library.Library(_OPERATORS, "IMPL")
    _mend(library, "all_gather_into_tensor", _gather)
    _mend(library, "all_gather_into_tensor_coalesced", _gather_coalesced)
    return library


def _mend(library: torch.library.Library, name: str, safe: Any) -> None:
    """Give operator ``name`` the kernel ``safe`` for gloo; torch's own stays for other groups."""
    before = torch.library.get_kernel(f"{_OPERATORS}::{name}", "CPU")

    def kernel(keys: Any, gathered: Any, ranks: int, group: Any) -> Any:
        if not _uses_gloo(group) or _is_complex(gathered):
            return before.call_boxed(keys, gathered, ranks, group)
        with torch.no_grad():
            return safe(gathered, ranks, group)

    library.impl(name, kernel, "CPU", with_keyset=True)


def _uses_gloo(group: Any) -> bool:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    return "cpu:gloo" in dist.get_backend_config(group)


def _is_complex(gathered: Tensor | list[Tensor]) -> bool:
    """Whether torch gathers it as real numbers, which is left to torch."""
    return any(t.is_complex() for t in ([gathered] if isinstance(gathered, Tensor) else gathered))


def _gather(shard: Tensor, ranks: int, group: Any) -> Tensor:
    if shard.dim() == 0:
        shard = shard.view(1)
    full = _full(shard, ranks)
    operators: Any = getattr(torch.ops, _OPERATORS)
    return operators.all_gather_into_tensor_out(shard.contiguous(), ranks, group, out=full)


def _gather_coalesced(shards: list[Tensor], ranks: int, group: Any) -> list[Tensor]:
    """As one gather of a flat buffer: gloo takes a millisecond for each one more in flight."""
    if len(shards) == 1 or len({shard.dtype for shard in shards}) > 1:
        return [_gather(shard, ranks, group) for shard in shards]
    full = [_full(shard, ranks) for shard in shards]
    flat = _gather(torch.cat([shard.reshape(-1) for shard in shards]), ranks, group)
    work = _Unpacking(flat.view(ranks, -1), [part.view(ranks, -1) for part in full])
    for part in full:
        torch._C._distributed_c10d._register_work(part, work)  # type: ignore[attr-defined]
    return full


def _full(shard: Tensor, ranks: int) -> Tensor:
    """Room for the shards of all ranks, one after the other."""
    rows, *rest = shard.shape or (1,)
    return shard.new_empty((ranks * rows, *rest))


class _Unpacking(dist.Work):
    """A gather of a flat buffer that fills tensors from it when the first of them is awaited."""

    def __init__(self, flat: Tensor, full: list[Tensor]) -> None:
        super().__init__()
        self._flat: Tensor | None = flat
        self._full = full

    def wait(self, timeout: Any = None) -> bool:  # the caller's own type differs by release
        if self._flat is not None:
            flat, self._flat = self._flat, None
            torch.ops._c10d_functional.wait_tensor(flat)
            with torch.no_grad():
                columns = flat.split([part.shape[1] for part in self._full], dim=1)
                torch._foreach_copy_(self._full, list(columns))
        return True
