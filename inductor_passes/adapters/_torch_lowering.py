"""Adapter: how Inductor lowers a graph of ours, or a part of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from inductor_passes.adapters import _torch
from inductor_passes.machine.stored import RepeatLimits


def compile_region(
    gm: GraphModule, example_inputs: Sequence[Any], *, is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Compile a part of a graph by Inductor; its outputs keep their strides.

    Inductor is not told what is known of the whole graph (its parameters, the strides of its
    outputs, which of its inputs may be written over). The user's passes after partitioning run on
    the part. The key of Inductor's cache includes the sources of our passes.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    record_original_output_strides(gm)
    fake_mode = next((v.fake_mode for v in example_inputs if hasattr(v, "fake_mode")), None)
    stored = [i for i, node in enumerate(gm.graph.nodes) if _torch.is_stored(node)]
    with tracing(TracingContext(fake_mode)), reuse_at_once(f"{_sources()} {stored}"):
        return compile_fx_inner(gm, example_inputs, is_backward=is_backward)  # type: ignore[return-value]


@cache
def _sources() -> str:
    """A hash of the passes' sources."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    files = sorted(map(str, Path(__file__).parents[1].rglob("*.py")))
    return get_hash_for_files(tuple(files)).hex()


def limits_of_repeating(device: torch.device) -> RepeatLimits:
    """The limits up to which Inductor repeats a loop on a device; CPUs have others since 2.13."""
    from torch._inductor import config

    def limit(name: str) -> int:
        default: int | None = getattr(config, f"_realize_{name}_default", None)
        if device.type == "cpu":
            default = getattr(config, f"realize_cpu_{name}", default)
        found: int | None = getattr(config, f"realize_{name}")
        if found is None:
            found = default
        if found is None:
            raise AttributeError(
                f"torch._inductor.config has no default of realize_{name} any more"
            )
        return found

    return RepeatLimits(
        limit("reads_threshold"), limit("acc_reads_threshold"), limit("opcount_threshold")
    )


_at_once: ContextVar[bool] = ContextVar("reuse_at_once", default=False)


@contextmanager
def reuse_at_once(told: str = "") -> Iterator[None]:
    """While Inductor writes code: a dead buffer is reused by the next kernel, or freed.

    By itself, Inductor keeps a dead buffer for a later one of its size, as long as its own estimate
    of the peak allows. That estimate counts a kernel which writes over what it reads twice (2.11 to
    2.15), so dead buffers fill memory that is really free: 16 % of a step's peak with all layers
    recomputed (``benchmarks/LOG.md``). The allocator reuses freed memory, too.

    Inductor's cache keeps such code apart from other code, and by the text ``told``.
    """
    from torch._inductor import config

    _ask_before_reuse()
    metadata = {**config.aot_inductor.metadata, "simplefsdp": f"reuse at once {told}"}
    token = _at_once.set(True)
    try:
        with config.patch({"aot_inductor.metadata": metadata}):
            yield
    finally:
        _at_once.reset(token)


@cache
def _ask_before_reuse() -> None:
    """Patch Inductor once for all threads. Code that is compiled outside of :func:`reuse_at_once`
    still gets Inductor's own rule."""
    from torch._inductor.codegen.wrapper import AllocateLine

    inherited = AllocateLine.should_reuse_buffer

    def should_reuse_buffer(line: Any, free_line: Any, size: int) -> bool:
        follows = free_line.scheduler_node_index + 1 >= line.scheduler_node_index
        if _at_once.get() and not follows and not line.comm_buffer:
            return False
        return inherited(line, free_line, size)

    AllocateLine.should_reuse_buffer = should_reuse_buffer  # type: ignore[method-assign, assignment]
