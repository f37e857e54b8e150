"""Refuses products of tensors of two dtypes, before their code is made.

While a graph is traced nobody compares these dtypes. The code would fail at its first call: after
all is compiled, in a file that nobody wrote, without the name of a module.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph

from simplefsdp import _torch

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
}


def refuse_mixed_dtypes(graph: Graph) -> None:
    """Raise ValueError if a product in ``graph``, a joint one, has operands of several dtypes."""
    for node in graph.nodes:
        if node.target not in _PRODUCTS:
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = sorted({str(value.dtype) for value in values if isinstance(value, Tensor)})
        if len(dtypes) > 1:
            module = _torch.module_path(node)
            raise ValueError(
                f"{node.target.name()}{f' of module {module}' if module else ''}"
                f"{_torch.line_of(node)}: expected operands of one dtype, got "
                f"{' and '.join(dtypes)}: cast the input to the parameter's dtype. An mp_policy "
                "casts parameters to its param_dtype, and of inputs only those of modules that are "
                "wrapped by themselves, as under FSDP2: wrap inner layers first, with the same one"
            )
