"""A compiled backward that gathers parameters again finds those of its forward, or raises.

If a parameter was written to in between, as by an optimizer's step for another loss, backward would
mix old activations with new weights. Of plain tensors autograd counts the writes, and raises where
one that was saved has changed. A write to a DTensor is counted there alone: it reaches the shard,
which is what is saved, below autograd. So the counts of the DTensors are compared here, before a
backward begins. Writes that no DTensor sees, as to its ``to_local()``, are not noticed; nor are any
where nothing is gathered, as on one rank. Where backward gathers from parts that forward has left
(``post_forward.py``), it has the values of forward, but raises all the same, as for plain tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from inductor_passes.adapters._torch import is_collective_start
from simplefsdp import _torch
from simplefsdp.frontend.living import fqns_of
from simplefsdp.provenance import gathered_fqn
from simplefsdp.words import few


def gathered_again(backward: Graph) -> frozenset[str]:
    """FQNs of the parameters that a backward graph gathers."""
    starts = filter(is_collective_start, backward.nodes)
    return frozenset(fqn for fqn in map(gathered_fqn, starts) if fqn is not None)


def refusing_writes(
    compiled: Callable[..., Any], gathered: Mapping[int, str], again: Set[str]
) -> Callable[..., Any]:
    """``compiled``, whose backward raises a RuntimeError if it gathers a parameter again that was
    written to after the forward.

    Args:
        compiled: of a Dynamo graph.
        gathered: FQNs of the parameters that forward gathers, by their places among the inputs. Of
            several models in one graph, parameters of one name cannot be told apart: they are not
            compared.
        again: those that backward gathers; filled in when it is compiled.
    """
    times = Counter(gathered.values())
    places = {place: fqn for place, fqn in gathered.items() if times[fqn] == 1}

    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        check: Callable[..., None] | None = None
        for node in _torch.backward_nodes(outputs, args):
            check = check or _checking([(args[p], fqn) for p, fqn in places.items()], again)
            # What a backward gathers is known before it runs, unless that is when it is compiled.
            (node.register_prehook if again else node.register_hook)(check)
        return outputs

    return call


def _checking(params: Sequence[tuple[DTensor, str]], again: Set[str]) -> Callable[..., None]:
    """A hook that raises if one of ``params`` that is gathered ``again`` is written to from now
    on."""
    known = [(param, fqn) for param, fqn in params if not again or fqn in again]
    before = [param._version for param, _ in known]

    def check(*_: Any) -> None:
        if torch.compiler.is_compiling():  # for compiled autograd, which cannot trace what follows
            return
        now = [param._version for param, _ in known]
        if now == before:
            return
        each = zip(known, before, now, strict=True)
        written = [one for one, old, new in each if old != new and one[1] in again]
        if written:
            raise RuntimeError(
                f"{few(fqns_of(written))}: written to between a forward and its backward, as by "
                "optimizer.step() for another loss; backward needs the values that forward had. "
                "Call backward before the write, or forward once more behind it"
            )

    return check
