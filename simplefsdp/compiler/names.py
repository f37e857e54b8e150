"""What parameters are called in a graph that is like one of before.

Dynamo runs code that it made of one module for others like it (experts, layers that are compiled
apart), with their parameters; that they have other names, it does not see. One rank may have to
compile such code anew, as for a batch of a size that no other has. What it then communicates, the
ranks have agreed on under the names of the first: with these there is nobody to wait for.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from simplefsdp import _torch
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.compiler.options import Options
from simplefsdp.frontend.gather import GatherSpec, spec_of
from simplefsdp.rank_guard import decisions


def named_as_before(gm: GraphModule, options: Options) -> list[GatherSpec]:
    """Give the gathers of ``gm``, in place, the names that they had in the first graph of the same
    code that gathers the same under the same ``options``; return how each is done. Where buckets
    are given by names, these stay."""
    gathers, code = gathers_of(gm), _torch.code_number()
    if gathers and code is not None and options.buckets is None:
        read = tuple(map(_read, gathers))
        key = ("names", code, torch.is_grad_enabled(), repr(options), read)
        first = decisions().setdefault(key, [node.args[1] for node in gathers])
        for node, fqn in zip(gathers, first, strict=True):
            node.args = (node.args[0], fqn, *node.args[2:])
    return list(map(spec_of, gathers))


def _read(gather: Node) -> Hashable:
    """What is gathered: by its name from where the code stands, and how. What the ranks would not
    compare is not to be in it: how often this rank reads it, say."""
    param, _, fields = gather.args
    assert isinstance(param, Node)
    value = param.meta["example_value"]
    layout = value.placements if isinstance(value, DTensor) else ()
    deferral = tuple(sorted((key, str(kind)) for key, kind in gather.kwargs.items()))
    return (
        _torch.input_name(param) or param.name,
        (*value.shape,),
        value.dtype,
        layout,
        value.requires_grad,
        fields,
        deferral,
    )
