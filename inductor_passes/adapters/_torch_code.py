"""Adapter: code that Inductor compiled, made fit to be saved, and callable again."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from torch.fx import GraphModule

from inductor_passes.adapters._torch import below_autograd, can_go_below_autograd


def is_kept_code(value: Any) -> bool:
    """Whether a value is a graph that Inductor compiled."""
    from torch._inductor.output_code import CompiledFxGraph

    return isinstance(value, CompiledFxGraph)


def codes_in(code: Any) -> Iterator[Any]:
    """The graphs that Inductor compiled for a compiled graph: itself, or those of its regions."""
    if is_kept_code(code):
        yield code
    else:
        yield from code.codes()


def without_callables(code: Any) -> dict[str, Any]:
    """All attributes of a compiled graph, without the callables that :func:`revive` makes again."""
    bare = copy(code)
    bare.prepare_for_serialization()
    return dict(vars(bare))


def revive(code: Any, *, is_backward: bool) -> None:
    """Make a compiled graph callable again that was saved without its callables.

    Raises:
        RuntimeError: its files cannot be written, or found.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    found, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if found is None:
        raise RuntimeError("code of Inductor's is not in its cache any more")
    with tracing(TracingContext(None)):
        found.post_compile(
            [],
            constants,
            {"cudagraphs": BoxedBool(False), "is_backward": is_backward},
        )


def run_below_autograd(code: Any, gm: GraphModule | None = None) -> None:
    """Have a graph that Inductor compiled run inside :func:`below_autograd`, if it can.

    Args:
        code: the compiled graph. Whether it can run so is noted on it, and saved with it.
        gm: the graph that it was compiled from; None if it was saved before.
    """
    if not is_kept_code(code):
        return
    if gm is not None:
        code.can_go_below_autograd = can_go_below_autograd(gm)
    if not code.can_go_below_autograd:
        return
    run = code.current_callable

    def call(inputs: Any) -> Any:
        with below_autograd():
            return run(inputs)

    code.current_callable = call
