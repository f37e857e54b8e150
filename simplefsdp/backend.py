"""The ``"simplefsdp"`` backend of ``torch.compile``: options -> passes, and early errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from simplefsdp import _torch
from simplefsdp.census import describe, take_census
from simplefsdp.dedupe import dedupe_gathers
from simplefsdp.options import Executor, parse_options
from simplefsdp.recompute import tag_for_recompute

log = logging.getLogger("simplefsdp")


def simplefsdp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph of a wrapped model; torch calls this, users name the backend.

    Args:
        gm: the graph.
        example_inputs: its (fake) inputs.
        options: see :class:`simplefsdp.options.Options`.

    Raises:
        ValueError: an unknown option, a graph that a graph break cut short, a parameter that
            :func:`simplefsdp.simple_fsdp` did not shard, or one that is written to. Dynamo
            reports it as the cause of its ``BackendCompilerFailed``.
    """
    choice = parse_options(options)
    _refuse_unwrapped(gm)
    _refuse_graph_break(gm)
    dedupe_gathers(gm)
    return _compile(gm, example_inputs, choice.executor)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], executor: Executor
) -> Callable[..., Any]:
    if executor == "aot_eager":
        return _torch.compile_with_aot_eager(
            gm, example_inputs, observe=_log_census, joint_pass=tag_for_recompute
        )
    return _torch.compile_with_inductor(
        gm, example_inputs, observe=_log_census, joint_pass=tag_for_recompute, uuid=_uuid()
    )


@functools.cache
def _uuid() -> str:
    """The passes' identity for Inductor's cache: the sources of the frontend, all of them."""
    sources = Path(__file__).parent.glob("*.py")
    return _torch.hash_of_files(sorted(map(str, sources)))


def _log_census(gm: GraphModule, is_backward: bool) -> None:
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    level = logging.INFO if speaks else logging.DEBUG
    log.log(level, describe(take_census(gm.graph), is_backward=is_backward))


def _refuse_graph_break(gm: GraphModule) -> None:
    cut = _torch.graph_break_of(gm)
    if cut is None:
        return
    where = cut.stack[-1] if cut.stack else None
    last = next((m for n in reversed(gm.graph.nodes) if (m := _torch.module_path(n))), None)
    raise ValueError(
        "graph break: the simplefsdp backend needs the whole model in one graph, but Dynamo "
        f"stopped{f' in or after module {last}' if last else ''}"
        f"{f', at {where.filename}:{where.lineno} ({where.line})' if where else ''}. Change that "
        f"line, or compile the part of the model without it. Dynamo's reason: {cut.reason}"
    )


def _refuse_unwrapped(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _is_plain_parameter(node):
            user = next((u for u in node.users if _torch.module_path(u)), None)
            module = f" of module {_torch.module_path(user)}" if user is not None else ""
            module += _torch.line_of(user)
            raise ValueError(
                f"parameter {_torch.input_name(node) or node.name}{module} is not "
                "sharded: call simplefsdp.simple_fsdp(model, mesh) before "
                'torch.compile(model, backend="simplefsdp"), and register no parameters after it'
            )


def _is_plain_parameter(placeholder: Node) -> bool:
    value = placeholder.meta.get("example_value")
    return isinstance(value, nn.Parameter) and not isinstance(value, DTensor)
