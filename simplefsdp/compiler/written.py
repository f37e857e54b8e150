"""A compiled backward computes with the parameters of its forward, or raises.

Backward gathers again what forward gathered. If a parameter was written to in between, as by an
optimizer's step for another loss, it would mix old activations with new weights. Of plain tensors
autograd counts the writes, and raises where one that was saved has changed. A write to a DTensor is
counted there alone: it reaches the shard, which is what is saved, below autograd. So the counts of
the DTensors are compared here, before a backward begins. (On one rank nothing is gathered, and
nothing compared.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch.distributed.tensor import DTensor
from torch.fx import Graph

from simplefsdp import _torch
from simplefsdp.provenance import gathered_fqn
from simplefsdp.words import few


def gathered_again(backward: Graph) -> frozenset[str]:
    """FQNs of the parameters whose shards a backward graph reads."""
    found = set()
    for node in backward.nodes:
        if any(source.op == "placeholder" for source in node.all_input_nodes):
            found.add(gathered_fqn(node))
    return frozenset(fqn for fqn in found if fqn is not None)


def refusing_writes(
    compiled: Callable[..., Any], gathered: Mapping[int, str], again: Set[str]
) -> Callable[..., Any]:
    """``compiled``, whose backward raises a RuntimeError if it gathers a parameter again that was
    written to after the forward.

    Args:
        compiled: of a Dynamo graph.
        gathered: FQNs of the parameters that forward gathers, by their places among the inputs.
        again: those that backward gathers; filled in when it is compiled.
    """

    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        check: Callable[..., None] | None = None
        for node in _torch.backward_nodes(outputs):
            check = check or _checking({fqn: args[place] for place, fqn in gathered.items()}, again)
            # What a backward gathers is known before it runs, unless that is when it is compiled.
            (node.register_prehook if again else node.register_hook)(check)
        return outputs

    return call


def _checking(params: Mapping[str, DTensor], again: Set[str]) -> Callable[..., None]:
    """A hook that raises if one of ``params`` that is gathered ``again`` is written to from now
    on."""
    known = [(fqn, param) for fqn, param in params.items() if not again or fqn in again]
    before = [param._version for _, param in known]

    def check(*_: Any) -> None:
        now = [param._version for _, param in known]
        if now == before:
            return
        each = zip(known, before, now, strict=True)
        written = [fqn for (fqn, _), old, new in each if old != new and fqn in again]
        if written:
            raise RuntimeError(
                f"{few(written)}: written to between a forward and its backward, as by "
                "optimizer.step() for another loss; backward needs the values that forward had. "
                "Call backward before the write, or forward once more behind it"
            )

    return check
