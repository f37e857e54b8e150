"""What parameters are called in a graph that is like an earlier one.

Dynamo runs code that it compiled for one module also for other modules like it (experts, layers
that are compiled apart), with their parameters; it does not see that these have other names. One
rank may have to compile such code again, for a batch size that no other rank has, say. Earlier, the
ranks have agreed on what this graph communicates, under the names of the first module. If the graph
has the same names, this rank need not wait for the others.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from simplefsdp import _torch
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.compiler.options import Options
from simplefsdp.frontend.gather_spec import GatherSpec, spec_of
from simplefsdp.rank_guard import decisions


def named_as_before(gm: GraphModule, options: Options) -> list[GatherSpec]:
    """Give the gathers of ``gm``, in place, the names that they had in the first graph of the same
    code that gathers the same under the same ``options``; return the spec of each gather. If the
    user gives buckets by names, names stay as they are."""
    gathers, code = gathers_of(gm), _torch.code_number()
    if gathers and code is not None and options.buckets is None:
        read = tuple(map(_read, gathers))
        key = ("names", code, torch.is_grad_enabled(), repr(options), read)
        first = decisions().setdefault(key, [node.args[1] for node in gathers])
        for node, fqn in zip(gathers, first, strict=True):
            node.args = (node.args[0], fqn, *node.args[2:])
    return list(map(spec_of, gathers))


def _read(gather: Node) -> Hashable:
    """What is gathered, by its name as seen from the code that reads it, and how. Only what the
    ranks compare may be in it; how often this rank reads the parameter, say, may not."""
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
