"""The executor of regions: Inductor compiles each structure once, Python calls them in order."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from inductor_passes.adapters import _torch, _torch_lowering
from inductor_passes.adapters.strides import correct_strides
from inductor_passes.executor.regions import Region, cut, graph_of, structure_of
from inductor_passes.executor.straight_line import Compiled, straight_line

log = logging.getLogger("simplefsdp")


class Codes:
    """Compiled regions by structure, of the forward and the backward graph of one compilation."""

    def __init__(self) -> None:
        self._code_of: dict[tuple[str, bool], Compiled] = {}

    def __len__(self) -> int:
        return len(self._code_of)

    def code_of(self, region: Region, *, is_backward: bool) -> Compiled:
        """The code of ``region``, compiled now if no region like it was compiled before."""
        key = (structure_of(region), is_backward)
        if key not in self._code_of:
            values = [node.meta["val"] for node in region.inputs]
            self._code_of[key] = _torch_lowering.compile_region(
                graph_of(region), values, is_backward=is_backward
            )
        return self._code_of[key]


def compile_by_regions(gm: GraphModule, codes: Codes, *, is_backward: bool) -> Compiled:
    """Compile a forward or backward graph without symbols; its order is kept.

    Args:
        gm: the graph, whose collectives are bucketed and in order.
        codes: the regions compiled so far; new structures are added.
        is_backward: as AOTAutograd says.
    """
    correct_strides(gm.graph)
    pieces = cut(gm.graph)
    before = len(codes)
    program = straight_line(gm, pieces, partial(codes.code_of, is_backward=is_backward))
    regions = sum(isinstance(piece, Region) for piece in pieces)
    log.debug(
        "%s graph: %d regions, of which %d were compiled; %d calls of single operators",
        "backward" if is_backward else "forward",
        regions,
        len(codes) - before,
        len(pieces) - regions,
    )
    outputs: Any = gm.graph.output_node().args[0]
    values = [v.meta.get("val") if isinstance(v, Node) else v for v in outputs]
    _torch.report_output_strides(values)
    return program


def has_symbols(gm: GraphModule) -> bool:
    """Whether sizes in a graph are symbols, as for batches of several sizes, or sizes that depend
    on data. Inductor must see such a graph as a whole."""
    return any(_torch.has_symbols(node.meta.get("val")) for node in gm.graph.nodes)
