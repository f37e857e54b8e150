"""Which parameter a graph node belongs to: written while tracing, read by every later stage.

A gather of FSDP and a gather of tensor parallelism are the same op in a graph. The difference is
recorded when the node is made (``torch.fx.traceback.annotate``) and travels in
``node.meta["custom"]`` from the Dynamo graph to the joint, forward and backward graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.fx.traceback as fx_traceback
from torch.fx import Node

from simplefsdp._torch import annotate_backward

_GATHER = "simplefsdp_gather"
_REDUCE = "simplefsdp_reduce"
_RESHARD = "simplefsdp_reshard_after_forward"
_PART = "simplefsdp_post_forward_part"


def gather_of(fqn: str, *, reshard_after_forward: bool | str) -> AbstractContextManager[object]:
    """Mark the nodes traced inside as the gather chain of the parameter ``fqn``."""
    return fx_traceback.annotate({_GATHER: fqn, _RESHARD: reshard_after_forward})


def post_forward_part() -> AbstractContextManager[object]:
    """Mark the nodes traced inside as the part of a full parameter that stays after forward."""
    return fx_traceback.annotate({_PART: True})


def reduce_of(fqn: str) -> AbstractContextManager[object]:
    """Mark the nodes traced inside as the reduce chain of the parameter ``fqn``."""
    return annotate_backward({_REDUCE: fqn})


def renamed(marks: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, object]:
    """The ``marks`` of a node, for its ``meta["custom"]``, with ``rename`` applied to each FQN."""
    return {k: rename(v) if k in (_GATHER, _REDUCE) else v for k, v in marks.items()}


def _marks(node: Node) -> Mapping[str, Any]:
    marks = node.meta.get("custom")
    return marks if isinstance(marks, Mapping) else {}


def reduced_fqn(node: Node) -> str | None:
    """FQN of the parameter whose gradient ``node`` reduces, or None."""
    fqn: str | None = _marks(node).get(_REDUCE)
    return fqn


def gathered_fqn(node: Node) -> str | None:
    """FQN of the parameter that ``node`` gathers, or None. Autograd copies the marks of a forward
    node to its backward nodes, so a node of a reduce chain may carry both marks; it is then a
    reduce, and gathers nothing."""
    marks = _marks(node)
    return None if _REDUCE in marks else marks.get(_GATHER)


def carried_fqn(start: Node) -> str | None:
    """FQN of the parameter that a collective's launch ``start`` gathers or reduces, or None."""
    return reduced_fqn(start) or gathered_fqn(start)


def is_post_forward_part(node: Node) -> bool:
    """Whether ``node`` makes the part of a full parameter that stays after forward."""
    return bool(_marks(node).get(_PART)) and gathered_fqn(node) is not None


def reshards_after_forward(node: Node) -> bool:
    """Whether the gather chain that ``node`` belongs to is recomputed in backward."""
    return bool(_marks(node).get(_RESHARD))
