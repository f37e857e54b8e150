"""One Dynamo graph through AOTAutograd and the passes to code, the same on all ranks.

Each graph, forward, backward or both, is observed (``observed.py``) before it is lowered. If an
earlier process has left the code (``warm_start.py``), or another rank has just made it
(``by_one_rank.py``), nothing is traced.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters._torch_fusions import fusions_as_planned
from inductor_passes.executor import regional
from inductor_passes.passes import ImposeOrder, bucket_and_reorder
from inductor_passes.rehearsal import Settings
from simplefsdp import _torch
from simplefsdp._torch.symbolic import open_layouts
from simplefsdp.compiler.by_one_rank import by_one_rank
from simplefsdp.compiler.lengthen import few_layers_traced
from simplefsdp.compiler.mixed_dtypes import refuse_mixed_dtypes
from simplefsdp.compiler.observed import Observed, meet_compiled, observe
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.plans import Compilation
from simplefsdp.compiler.recompute import (
    save_copies_of_inputs,
    tag_for_recompute,
    tag_in_one_graph,
)
from simplefsdp.compiler.size_limits import SizeLimits
from simplefsdp.compiler.warm_start import WarmStart
from simplefsdp.provenance import carried_fqn
from simplefsdp.rank_guard import have_the_same
from simplefsdp.rank_logging import say

_numbers = itertools.count()

Call = Callable[..., Any]


class Extension(NamedTuple):
    """Makes a whole training step of the graph of a loss, see :mod:`simplefsdp.step`."""

    agreed: Sequence[str]  # what must be the same on all ranks, line by line
    # Takes a Dynamo graph and its inputs. Gives the graph to compile, the inputs of that graph, and
    # a function that wraps the compiled code, so that it is called as the Dynamo graph would be.
    extend: Callable[
        [GraphModule, Sequence[Any]], tuple[GraphModule, Sequence[Any], Callable[[Call], Call]]
    ]


def begin_preparing(executor: str, device_type: str) -> None:
    """Start, without waiting, what Inductor prepares once per machine, if it will be needed."""
    if executor != "aot_eager" and device_type == "cpu":
        _torch.prepare_cpp()


def compile_with_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: Settings | None,
    ranks: Sequence[int],
    *,
    together: bool,
    again: set[str],
    whole_step: bool = False,
) -> Callable[..., Any]:
    """Compile one Dynamo graph for its inputs; the graph is changed. ``together`` says
    whether all ranks compile it now. The FQNs of what backward gathers are added to ``again``."""
    number, grad = next(_numbers), torch.is_grad_enabled()
    limits = SizeLimits(gm)
    compilation = Compilation(
        options, settings, tuple(ranks), grad, number, limits, again, whole_step, not together
    )
    warm = WarmStart(gm, example_inputs, compilation)

    def compile_for(compilation: Compilation) -> Callable[..., Any]:
        compiler = _Compiler(compilation, warm)
        # The code holds the compiler, which must not hold a batch, or parameters since replaced.
        compiled = partial(compiler.compiled, example_inputs=example_inputs)
        code = compiled(gm, _torch.AS_ONE) if whole_step else few_layers_traced(gm, compiled)
        warm.accept()
        return limits.watching(code)

    code = warm.code(together=together)
    if code is None and warm.shared:
        for_all = compilation._replace(ranks=())
        code = by_one_rank(compilation, warm, lambda: compile_for(for_all))
    if code is not None:
        return code
    # Where sizes are open, AOTAutograd compiles the backward with the forward. If sizes are open on
    # some ranks only, all ranks do so: else some would compare their backward graphs while others
    # run their forward, and each side would wait for the other.
    what, timeout_s = "which sizes are open", compilation.timeout_s
    alike = not together or have_the_same(what, open_layouts(gm), ranks, timeout_s)
    with nullcontext() if alike else _torch.backward_compiled_at_once():
        return compile_for(compilation)


class _Compiler:
    """Compiles the forward and the backward graph of a Dynamo graph."""

    def __init__(self, compilation: Compilation, warm: WarmStart) -> None:
        self.compilation, self.warm = compilation, warm
        self.settings, self.executor = compilation.settings, compilation.options.executor
        self.current = Observed()
        self.codes = regional.Codes()

    def compiled(
        self,
        graph: GraphModule,
        cut: _torch.Cut | _torch.AsOne | None,
        example_inputs: Sequence[Any],
    ) -> Callable[..., Any]:
        """The code of ``graph``; ``cut`` says how its joint graph is cut, None for torch's way."""
        passes = None if self.settings is None else self._write_plan

        def joint_pass(joint: Graph) -> None:
            refuse_mixed_dtypes(joint)
            (tag_in_one_graph if cut == _torch.AS_ONE else tag_for_recompute)(joint)

        if self.executor == "aot_eager":
            return _torch.compile_with_aot_eager(
                graph,
                example_inputs,
                observe=self._note,
                compiled=self._meet,
                joint_pass=joint_pass,
                graph_pass=passes,
                cut=cut,
            )
        self.warm.begin()

        def results(is_backward: bool, code: Any) -> None:
            self._meet(is_backward)
            self.warm.add(is_backward, self.current, code)

        scheduler, lowering = self._orders()
        return _torch.compile_with_inductor(
            graph,
            example_inputs,
            _torch.Passes(save_copies_of_inputs, joint_pass, passes, scheduler, self._uuid),
            observe=self._by_regions if self.executor == "regions" else self._note,
            lowering=lowering,
            cudagraphs=self.compilation.options.cudagraphs,
            results=_torch.Results(results, self.warm.finish if self.warm.can_keep else None),
            cut=cut,
        )

    def _orders(self) -> tuple[ImposeOrder | None, Callable[[], AbstractContextManager[None]]]:
        """The pass for Inductor's scheduler, and a context for lowering. With a plan, compute also
        keeps the order that the plan was made for. Where forward and backward are one graph,
        however the buckets are chosen, a loop of forward is not fused with a loop of backward
        merely because both read the same tensors."""
        if self.settings is None or not self.settings.reorder:
            return None, nullcontext
        as_planned = self.settings.auto is not None
        order = ImposeOrder(self.settings.policy, as_planned, self.compilation.identity)
        restricted = as_planned or self.compilation.whole_step
        return order, fusions_as_planned if restricted else nullcontext

    def _uuid(self) -> str:
        known = f"{self.compilation.identity}{self.current.planned}"
        return hashlib.sha256(known.encode()).hexdigest()

    def _note(self, graph: GraphModule, is_backward: bool) -> None:
        self.current, _ = observe(graph, is_backward, self.compilation)

    def _meet(self, is_backward: bool) -> None:
        meet_compiled(self.current, self.compilation, is_backward)

    def _by_regions(self, graph: GraphModule, is_backward: bool) -> Callable[..., Any] | None:
        self.current, reading = observe(graph, is_backward, self.compilation)
        if regional.has_symbols(graph):
            part = self.compilation.part(is_backward)
            say("%s graph: sizes are symbols, so it is compiled whole, not by regions", part)
            return None
        self._write_plan(graph.graph, reading)
        return regional.compile_by_regions(graph, self.codes, is_backward=is_backward)

    def _write_plan(self, graph: Graph, read: fx.Reading | None = None) -> None:
        if self.settings is not None:
            bucket_and_reorder(graph, self.settings, carried_fqn, self.current.planned, read)
