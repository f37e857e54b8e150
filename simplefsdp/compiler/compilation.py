"""One Dynamo graph through AOTAutograd and the passes to code, the same on all ranks.

Each graph, forward, backward or both, is observed (``observed.py``) before it is lowered. If an
earlier process has left the code (``warm_start.py``), nothing is traced.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters._torch_lowering import fusions_as_planned
from inductor_passes.executor import regional
from inductor_passes.passes import ImposeOrder, bucket_and_reorder
from inductor_passes.rehearsal import Settings
from simplefsdp import _torch
from simplefsdp.compiler.cache_key import identity
from simplefsdp.compiler.lengthen import few_layers_traced
from simplefsdp.compiler.observed import Compilation, Observed, meet_compiled, observe
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.compiler.size_limits import SizeLimits
from simplefsdp.compiler.warm_start import WarmStart
from simplefsdp.provenance import carried_fqn
from simplefsdp.rank_logging import say

_numbers = itertools.count()


def begin_preparing(executor: str, device_type: str) -> None:
    """Begin what Inductor does once per machine, where it will be needed, and do not wait."""
    if executor != "aot_eager" and device_type == "cpu":
        _torch.prepare_cpp()


def compile_with_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: Settings | None,
    ranks: Sequence[int],
    *,
    together: bool = True,
    whole_step: bool = False,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: the graph; owned by the callee.
        example_inputs: its (fake) inputs.
        options: the user's.
        settings: of the passes; None for none.
        ranks: that compile it together; none if they do not compare.
        together: whether they all do so now.
        whole_step: whether ``gm`` computes its gradients itself, from its last input on.

    Raises:
        RankMismatchError, PassError, ValueError: see :func:`observe`.
    """
    base = identity(settings)
    compilation = Compilation(
        settings,
        tuple(ranks),
        options.rank_guard_timeout_s,
        torch.is_grad_enabled(),
        next(_numbers),
        SizeLimits(gm),
        whole_step,
    )
    warm = WarmStart(gm, example_inputs, compilation, options, base)
    if (code := warm.code(together=together)) is not None:
        return code
    compiler = _Compiler(example_inputs, options, compilation, base, warm)
    if whole_step:
        code = compiler.compiled(gm, _torch.AS_ONE)
    else:
        code = few_layers_traced(gm, compiler.compiled)
    warm.accept()
    return compilation.limits.watching(code)


class _Compiler:
    """What happens to the forward and the backward graph of a Dynamo graph.

    Attributes:
        current: what was observed of the one that is being compiled.
    """

    def __init__(
        self,
        example_inputs: Sequence[Any],
        options: Options,
        compilation: Compilation,
        identity: str,
        warm: WarmStart,
    ) -> None:
        self.example_inputs, self.options, self.compilation = example_inputs, options, compilation
        self.settings, self.identity, self.warm = compilation.settings, identity, warm
        self.current = Observed()
        self.codes = regional.Codes()

    def compiled(
        self, graph: GraphModule, cut: _torch.Cut | _torch.AsOne | None
    ) -> Callable[..., Any]:
        """The code of a graph, whose joint graph is cut as it is told."""
        passes = None if self.settings is None else self._write_plan
        if self.options.executor == "aot_eager":
            return _torch.compile_with_aot_eager(
                graph,
                self.example_inputs,
                observe=self._note,
                compiled=self._meet,
                joint_pass=tag_for_recompute,
                graph_pass=passes,
                cut=cut,
            )
        attempt = self.warm.attempt()

        def results(is_backward: bool, code: Any) -> None:
            self._meet(is_backward)
            attempt.add(is_backward, self.current, code)

        return _torch.compile_with_inductor(
            graph,
            self.example_inputs,
            _torch.Passes(
                joint=tag_for_recompute,
                graph=passes,
                scheduler=_scheduler_pass(self.settings, self.identity),
                uuid=self._uuid,
            ),
            observe=self._by_regions if self.options.executor == "regions" else self._note,
            lowering=_lowering(self.settings),
            cudagraphs=self.options.cudagraphs,
            results=_torch.Results(results, attempt.finish if self.warm.can_keep else None),
            cut=cut,
        )

    def _uuid(self) -> str:
        return hashlib.sha256(f"{self.identity}{self.current.planned}".encode()).hexdigest()

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


def _as_planned(settings: Settings | None) -> bool:
    """Whether compute, too, keeps the order that the plan was made for."""
    return settings is not None and settings.reorder and settings.auto is not None


def _lowering(settings: Settings | None) -> Callable[[], AbstractContextManager[None]]:
    return fusions_as_planned if _as_planned(settings) else nullcontext


def _scheduler_pass(settings: Settings | None, identity: str) -> ImposeOrder | None:
    if settings is None or not settings.reorder:
        return None
    return ImposeOrder(settings.policy, _as_planned(settings), identity)
