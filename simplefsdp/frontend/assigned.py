"""Refuses parameters that something was assigned to by ``param.data = values``.

A DTensor loses these values: it computes with its shard, which is an attribute of its own. But the
assignment gives the DTensor itself, whose storage holds nothing, another storage; that is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from simplefsdp._torch import storage_number

# Of a parameter: its own id, since a copy has its attributes, and the number of its storage.
_STORAGE = "_simple_fsdp_storage"


def refuse_assigned(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if anything was assigned to the ``.data`` of one of these parameters, DTensors with
    their FQNs, since this function saw it first."""
    for fqn, param in named:
        now, before = (id(param), storage_number(param)), param.__dict__.get(_STORAGE)
        if now == before:
            continue
        if before is not None and before[0] == now[0]:
            raise ValueError(
                f"{fqn}: something was assigned to its .data, which a DTensor loses: it has the "
                "values of before. Write `with torch.no_grad(): param.copy_(values)`, also in an "
                "optimizer that puts weights back, such as SAM"
            )
        setattr(param, _STORAGE, now)
