"""Refuses parameters that something was assigned to by ``param.data = values``.

A DTensor loses these values: it computes with its shard, which is an attribute of its own. But the
assignment gives the DTensor itself, whose storage holds nothing, another storage; that is noticed
before a forward, an optimizer's step and a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from simplefsdp._torch import storage_number

# On a parameter as it was when it was seen first: its own id, since a copy has its attributes; the
# number of its storage; and its FQN. This is pickled with a parameter, so it is a plain tuple.
_SEEN = "_simple_fsdp_storage"


def refuse_assigned(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if anything was assigned to the ``.data`` of one of these parameters, DTensors with
    their FQNs, since this function saw it first."""
    for fqn, param in named:
        now = id(param), storage_number(param)
        before: tuple[int, int, str] | None = param.__dict__.get(_SEEN)
        if before is not None and now == before[:2]:
            continue
        if before is not None and before[0] == id(param):
            raise ValueError(
                f"{fqn}: something was assigned to its .data, which a DTensor loses: it has the "
                "values of before. Write `with torch.no_grad(): param.copy_(values)`, also in an "
                "optimizer that puts weights back, such as SAM"
            )
        setattr(param, _SEEN, (*now, fqn))


def forget_seen(module: nn.Module) -> None:
    """Forget what :func:`refuse_assigned` noted of the own parameters of ``module``, a copy: the
    ``id`` of the parameter that one was copied from may be its own by now."""
    for param in module._parameters.values():
        getattr(param, "__dict__", {}).pop(_SEEN, None)


def refuse_assigned_since(params: Iterable[Tensor]) -> None:
    """:func:`refuse_assigned` for those of ``params`` that it has seen before."""
    seen = ((param.__dict__.get(_SEEN), param) for param in params)
    refuse_assigned((before[2], param) for before, param in seen if before is not None)
