"""How one parameter is gathered, as constants that a traced graph can hold.

Tensor vocabulary, used by every file:

- *rows*: what the dimension that is sharded consists of. That is dim 0, unless the user's
  ``shard_placement_fn`` says otherwise: then it is brought to the front while a tensor is sent, and
  the sizes below are of that form;
- *shard*: the local tensor of the sharded DTensor, ``[rows_of_this_rank, ...]`` in the
  parameter's own dtype; rows are split as ``torch.chunk`` does, so late ranks may hold fewer
  rows or none;
- *full*: the gathered tensor, ``[rows, ...]`` in ``param_dtype``, that the model computes with;
- *padded*: a shard or full gradient brought up to ``ranks * ceil(rows / ranks)`` rows, since a
  collective moves the same number of bytes on every rank.
"""

from __future__ import annotations

import functools
import json
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node


class GatherSpec(NamedTuple):
    """How one parameter is gathered; constants only, so that a traced graph can hold them."""

    fqn: str  # fully qualified name of the parameter in the wrapped model
    rows: int  # size of the full tensor's dimension that is sharded; 0 if none is
    shard_group: str  # name of the process group the shards are spread over; "" if not sharded
    shard_ranks: int  # number of ranks in ``shard_group``; 1 if not sharded
    reduce_group: str  # name of the process group, of the same ranks, that gradients are reduced in
    # (name, ranks) of each process group that holds copies of the shard.
    copy_groups: tuple[tuple[str, int], ...]
    # Dtype on the wire and in compute; None keeps the shard's dtype.
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None  # dtype of the reduce; None keeps the gradient's dtype
    averages: bool  # the backend can average by itself (NCCL); otherwise we sum and divide
    # What the sum of gradients over all ranks is divided by; None for their number.
    divide_factor: float | None
    # The compiler recomputes the gather in backward; ``"auto"`` until a planner has decided
    # (``reshard.py``).
    reshard_after_forward: bool | Literal["auto"]
    # What the parameter's class adds to its gather (``tensor_class.py``); "" for a plain tensor.
    tensor_class: str = ""
    dim: int = 0  # the dimension that is sharded
    # After forward each rank keeps a part of the full parameter, and backward gathers these parts:
    # name of the process group of those parts, a part of the shard group; "" to keep the shard only
    post_forward_group: str = ""
    post_forward_ranks: int = 1  # number of ranks in it
    post_forward_rank: int = 0  # this rank's place among them

    def arguments(self) -> tuple[str, str]:
        """The spec as arguments of a ``gather``: the FQN, and the other fields as one text.

        Dynamo guards each constant of each read: as many fields would be as many guards, to be
        made once and checked at every step.
        """
        return self.fqn, json.dumps(self[1:], default=lambda x: str(x).removeprefix("torch."))


# Fields of a spec: after forward a rank keeps its shard only.
NO_PARTS = {"post_forward_group": "", "post_forward_ranks": 1, "post_forward_rank": 0}


@functools.cache
def spec_from(fqn: str, fields: str) -> GatherSpec:
    """The inverse of :meth:`GatherSpec.arguments`."""
    spec = GatherSpec(fqn, *json.loads(fields))
    dtypes = (spec.param_dtype, spec.reduce_dtype)  # by name
    param_dtype, reduce_dtype = (None if x is None else getattr(torch, str(x)) for x in dtypes)
    return spec._replace(
        copy_groups=tuple((name, ranks) for name, ranks in spec.copy_groups),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )


def spec_of(node: Node) -> GatherSpec:
    """How a ``gather`` in a Dynamo graph is done."""
    _, fqn, fields = node.args
    return spec_from(str(fqn), str(fields))


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])


def rows_first(tensor: Tensor, spec: GatherSpec) -> Tensor:
    """A view of ``tensor``, a shard or a full tensor, with the dimension that is sharded first."""
    return tensor.movedim(spec.dim, 0) if spec.dim else tensor


def rows_in_place(tensor: Tensor, spec: GatherSpec) -> Tensor:
    """The inverse of :func:`rows_first`, as a contiguous copy: code may view it as it views a plain
    tensor."""
    return tensor.movedim(0, spec.dim).contiguous() if spec.dim else tensor


def padded_rows(spec: GatherSpec) -> int:
    """Rows of a shard with its padding."""
    return -(-spec.rows // spec.shard_ranks)
