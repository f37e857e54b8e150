"""Which dimension of each parameter is sharded: the first, unless ``shard_placement_fn`` says
otherwise, as it does for FSDP2.

The first dimension of a stack of experts is their number. If there are more ranks than experts,
most shards are empty, and each gather sends padding in their place::

    8 experts, [8, 4096, 14336], 64 ranks
    Shard(0)  8 ranks hold an expert each, 56 hold nothing; sent: 64 experts
    Shard(1)  each rank holds 64 of 4096 rows of every expert; sent: 8 experts
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.tensor import Shard

from simplefsdp.frontend.placement import local_part
from simplefsdp.frontend.tensor_class import METHODS
from simplefsdp.rank_logging import speaks
from simplefsdp.words import few

log = logging.getLogger("simplefsdp")

PlacementFn = Callable[[nn.Parameter], Shard | None]

# Padding is told of if it is more than a tenth of what all gathers send, and than a MiB.
_MUCH_PADDING = 0.1
_FEW_NBYTES = 1 << 20


def shard_dims(
    params: Mapping[int, tuple[str, nn.Parameter]], placement_fn: PlacementFn | None
) -> dict[int, int]:
    """The dimension along which to shard each of ``params``, by its key there; 0 for a scalar.

    Args:
        params: FQNs and parameters.
        placement_fn: gives a parameter's ``Shard``; None, or no function, stands for ``Shard(0)``.

    Raises:
        TypeError: it gives something else.
        ValueError: a parameter has no such dimension, or its class sends rows only.
    """
    if placement_fn is None:
        return dict.fromkeys(params, 0)
    return {key: _dim(fqn, p, placement_fn(p)) for key, (fqn, p) in params.items()}


def _dim(fqn: str, param: nn.Parameter, placement: object) -> int:
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise TypeError(
            f"{fqn}: shard_placement_fn: expected None or torch.distributed.tensor.Shard(dim), got "
            f"{placement!r}; to shard some parameters over another mesh, wrap their module first, "
            "with that mesh"
        )
    dims = max(1, param.dim())
    if not -dims <= placement.dim < dims:
        raise ValueError(
            f"{fqn}: shard_placement_fn: got {placement!r} for a parameter of shape "
            f"{tuple(param.shape)}; expected a dimension that it has"
        )
    dim = placement.dim % dims
    if dim and any(hasattr(local_part(param), name) for name in METHODS):
        raise ValueError(
            f"{fqn}: shard_placement_fn: got {placement!r} for a {type(local_part(param)).__name__}"
            ", whose class says how its rows are sent; expected None or Shard(0)"
        )
    return dim


def tell_of_padding(
    params: Mapping[int, tuple[str, nn.Parameter]], dims: Mapping[int, int], ranks: int
) -> None:
    """Warn, on rank 0, if much of what gathers send is padding.

    Args:
        params: FQNs and parameters.
        dims: the dimension along which each is sharded, by its key.
        ranks: that share the shards.
    """
    paddings = {key: _padding(p, dims[key], ranks) for key, (_, p) in params.items()}
    nbytes, padding = sum(local_part(p).nbytes for _, p in params.values()), sum(paddings.values())
    if padding <= max(_FEW_NBYTES, _MUCH_PADDING * nbytes):
        return
    most = sorted(filter(paddings.get, paddings), key=lambda key: -paddings[key])
    log.log(
        logging.WARNING if speaks() else logging.DEBUG,
        "gathers send %.1f times the bytes of the parameters: %d ranks cannot evenly share the "
        "dimension along which %s are sharded%s",
        1 + padding / nbytes,
        ranks,
        few([params[key][0] for key in most]),
        _advice(params[most[0]][1], paddings[most[0]], ranks),
    )


def _padding(param: nn.Parameter, dim: int, ranks: int) -> int:
    """Bytes of padding that a gather of ``param`` sends if it is sharded along ``dim``."""
    local = local_part(param)
    rows = local.shape[dim] if local.dim() else 0
    return local.nbytes // rows * (-rows % ranks) if rows else 0


def _advice(param: nn.Parameter, padding: int, ranks: int) -> str:
    """What to do about the padding of ``param``; "" if no other dimension has less."""
    has_class = any(hasattr(local_part(param), name) for name in METHODS)
    dims = range(1 if has_class else param.dim())
    best = min(dims, key=lambda dim: _padding(param, dim, ranks), default=0)
    if _padding(param, best, ranks) >= padding:
        return ""
    return (
        ". Shard along another one: simple_fsdp(..., shard_placement_fn=lambda param: "
        f"Shard({best}) if param.dim() == {param.dim()} else None)"
    )
