"""Private parts of PyTorch that the passes touch, behind names of our own.

Each has a contract test in ``tests/adapters/test_passes_contract.py`` that says what moved.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from inductor_passes.adapters._torch_calls import (
    attends,
    call_of,
    generator_written_by,
    has_schema,
    makes_view,
    saves_generator,
    work_call,
    written_by,
)
from inductor_passes.ir.sizes import Size, is_open

WAIT = torch.ops._c10d_functional.wait_tensor.default
_wait_for_several = getattr(torch.ops._c10d_functional, "wait_tensors", None)  # since 2.15
_WAITS = {WAIT} | ({_wait_for_several.default} if _wait_for_several is not None else set())
_COLLECTIVE_NAMESPACES = {"_c10d_functional", "_dtensor"}
_OF_TORCH = {"aten", "inductor", "prim", "prims"} | _COLLECTIVE_NAMESPACES
_ARGUMENTS = re.compile(r"primals_|tangents_|arg\d+_|fwd_rng_|bwd_rng_|_")  # by AOTAutograd
_OF_NUMBERS = {getattr(torch, name) for name in dir(torch) if name.startswith("sym_")}


def is_op(node: Node) -> bool:
    """Whether a node calls an operator with a schema directly, not as another call's argument."""
    return isinstance(node.target, torch._ops.OpOverload)


def is_wait(node: Node) -> bool:
    """Whether a node waits for functional collectives: for one result, or for a list of them."""
    return node.target in _WAITS


def is_collective_start(node: Node) -> bool:
    """Whether a node launches a functional collective, data parallelism's or another."""
    if not is_op(node) or is_wait(node):
        return False
    return node.target.namespace in _COLLECTIVE_NAMESPACES  # type: ignore[union-attr]


def is_pure_python(node: Node) -> bool:
    """Whether a node calls a function of numbers or containers: ``getitem``, ``sym_max``."""
    module = getattr(node.target, "__module__", None)
    return module in ("_operator", "math", "builtins") or node.target in _OF_NUMBERS


def is_random(node: Node) -> bool:
    """Whether a node draws from a generator, so that its place among such nodes matters."""
    if saves_generator(node):
        return True
    return is_op(node) and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def is_saved(name: str) -> bool:
    """Whether an input of this name is a tensor that forward saved for backward, and that backward
    may write over; not an argument of the graph."""
    return functorch_config.donated_buffer and not _ARGUMENTS.match(name)


def is_view(node: Node) -> bool:
    """Whether a node's one result is a view of its first tensor argument."""
    return is_op(node) and makes_view(node.target)


def multiplies_matrices(node: Node) -> bool:
    """Whether a node is a matmul, a convolution or attention."""
    packet = getattr(work_call(node).target, "overloadpacket", None)
    return packet in flop_registry or (attends(node) and _is_of_heads(node.meta.get("val")))


def _is_of_heads(value: Any) -> bool:
    """Whether a traced value may be a result of attention, and not an index into its mask."""
    tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
    return any(v.is_floating_point() and v.dim() > 2 for v in tensors)


_STORED = "inductor_realize_to_strides"


def store(node: Node) -> None:
    """Have Inductor store the result of a node, which otherwise each loop that reads it may compute
    again. Inductor's cache does not see this mark."""
    node.meta[_STORED] = True


def is_stored(node: Node) -> bool:
    """Whether Inductor was told to :func:`store` what a node makes."""
    return bool(node.meta.get(_STORED))


def is_lookup_of_seed(node: Node) -> bool:
    """Whether a node takes one of the seeds that Inductor draws for a graph all at once."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.lookup_seed


def is_draw_of_seeds(node: Node) -> bool:
    """Whether a node draws all seeds of a graph; its first argument is how many."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.seeds


def module_path(node: Node) -> str | None:
    """Path of the innermost module whose forward made a node, or whose backward it belongs to.

    It begins with what the compiled function calls the model. None if it is of no module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    return _dotted(str(list(stack.values())[-1][0]))


@functools.lru_cache(4096)
def _dotted(path: str) -> str:
    """Dynamo's L['self'].layers[3] as L.self.layers.3; it also writes ._modules['layers'] and, of a
    module with a __getattr__, .__dict__['_modules']['layers']."""
    modules = r"(?:\._modules|\.__dict__\['_modules'\])?"
    return re.sub(modules + r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)


def draws_from_seed(node: Node) -> bool:
    """Whether a node draws random numbers from a seed that it is given. Only code that Inductor
    generates uses the seed: called by itself, the node draws from the device's generator."""
    from torch._inductor import inductor_prims

    return node.target in (inductor_prims.random, inductor_prims.randint)


def has_symbols(value: Any) -> bool:
    """Whether a traced value, or any of several, is a symbolic number or has one in its layout."""
    if isinstance(value, (list, tuple)):
        return any(map(has_symbols, value))
    if isinstance(value, torch.Tensor):
        return any(map(has_symbols, (*value.shape, *value.stride(), value.storage_offset())))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def layout_text(value: Any) -> str:
    """The layout of a traced value as a text, as far as code generated for it depends on it."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (bool, int, float)) else f"<{id(value)}>"
    aligned = value.storage_offset() * value.element_size() % 64 == 0
    bits = f"{aligned} {value.is_conj()} {value.is_neg()}"
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device} {bits}"


def mutated_arguments(node: Node) -> Sequence[Node]:
    """Nodes whose tensors ``node`` writes in place.

    A call without a schema (a higher-order op, a user's Triton kernel) may write all of its inputs.
    """
    if is_pure_python(node):
        return ()
    call = call_of(node)
    if not has_schema(call):
        return node.all_input_nodes
    found = generator_written_by(node)
    for i, name in written_by(call.target):
        value = call.args[i] if i < len(call.args) else call.kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [v for v in values if isinstance(v, Node)]
    return found


def size_hint(value: Any) -> int:
    """``value`` if it is a number; what it was when traced if it is symbolic, 0 if unknown.

    A symbolic value gives a :class:`~inductor_passes.ir.sizes.Size`, which knows the formula.
    """
    node = getattr(value, "node", None)
    if node is None:
        return int(value)
    hint = getattr(node, "hint", None)
    if hint is None:
        return 0
    return Size(int(hint), node.expr) if is_open(node.expr) else int(hint)


def itemsize(dtype: str) -> int:
    """Bytes of an element, by the name of its dtype."""
    return int(getattr(torch, dtype).itemsize)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside are real and on the CPU, though a compiler traces with fake ones, and
    whatever the default device is."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"):
        yield


def ranks_of_group(name: str) -> list[int] | None:
    """Global ranks of the process group with this name; None if this process has no such group."""
    from torch.distributed import distributed_c10d

    try:
        group = distributed_c10d._resolve_process_group(name)  # type: ignore
    except (LookupError, RuntimeError, ValueError):
        return None
    return distributed_c10d.get_process_group_ranks(group)


# Inductor


def has_wide_matmul(device: torch.device) -> bool:
    """Whether a matmul of 16-bit numbers can write its fp32 sums on a device; cuBLAS's can.

    Not if the user allows only other libraries or generated kernels: these have no such matmul in
    Inductor.
    """
    from torch._inductor import config

    if device.type != "cuda" or torch.version.hip is not None:
        return False
    libraries = config.max_autotune_gemm_backends.upper().replace(" ", "").split(",")
    return "ATEN" in libraries and not getattr(config.triton, "native_matmul", False)


def no_autocast() -> AbstractContextManager[Any]:
    """Operators inside run in the dtypes that they are given, whatever autocast is on."""
    return torch._C._DisableAutocast()


def below_autograd() -> AbstractContextManager[Any]:
    """Operators bypass autograd from this call on, until the context that it returns is left.

    Autograd of a compiled graph is done outside of the graph. Without this, each collective and
    each wait goes through the Python of its autograd formula (``torch/_library/autograd.py``), only
    to find that there is nothing to do. Only for graphs that :func:`can_go_below_autograd`.
    """
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return]


def can_go_below_autograd(gm: GraphModule) -> bool:
    """Whether all operators of a graph are torch's or ours. The kernel of another operator may use
    autograd itself (forces are gradients of an energy), and would get zeros."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    operators = (node.target for graph in graphs for node in graph.nodes if is_op(node))
    known = {*_OF_TORCH, "inductor_passes"}
    return all(op.namespace in known for op in operators)  # type: ignore[union-attr]


def report_output_strides(values: Sequence[Any]) -> None:
    """Tell AOTAutograd that the outputs of the graph that is compiled lie as they were traced."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            context.output_strides.append(tuple(value.stride()) if is_tensor else None)


# Inductor's scheduler


def is_scheduled_start(snode: Any) -> bool:
    """Whether a scheduler node is one collective's launch."""
    from torch._inductor.utils import is_collective

    return bool(is_collective(snode.node))


def is_scheduled_wait(snode: Any) -> bool:
    """Whether a scheduler node is a wait."""
    from torch._inductor.utils import is_wait

    return bool(is_wait(snode.node))


def is_scheduled_item(snode: Any) -> bool:
    """Whether a scheduler node only names one of several results of another."""
    from torch._inductor import ir

    return isinstance(snode.node, ir.MultiOutput)


def scheduled_reads(snode: Any, launched: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Names of the buffers whose writers must run before a scheduler node.

    Inductor marks a dependency that stands for a sequence, not for data, as fake. It chains the
    launches of collectives by fake dependencies, which are left out. It gives a write in place fake
    dependencies on the reads before it, which are kept, except on the launch of a collective that
    sends what is written: its wait reads that, too, so the write depends on the wait anyway. If the
    result of such a read is by now being reduced in place, Inductor names the result of the reduce,
    for which the write need not wait; so it depends on the buffer from before the launch.

    Args:
        snode: a scheduler node.
        launched: for each buffer that a collective fills, the ones it was before, if in place.
    """
    reads: set[str] = set()
    for dep in snode.unmet_dependencies:
        name = str(dep.name)
        is_sequence = getattr(dep, "is_fake", False) and name in launched
        if is_sequence and not is_scheduled_wait(snode):
            reads.update(() if is_scheduled_start(snode) else launched[name])
        else:
            reads.add(name)
    return tuple(sorted(reads))


def scheduled_mutations(snode: Any) -> dict[str, tuple[str, ...]]:
    """For each buffer that a scheduler node makes or writes to, the buffers that it was before."""
    return {str(b.get_name()): tuple(map(str, b.get_mutations())) for b in snode.get_outputs()}


def scheduled_writes(snode: Any) -> tuple[str, ...]:
    """Names of the buffers that a scheduler node makes or writes to."""
    return tuple(sorted(map(str, snode.get_buffer_names())))


def lowered_at(snode: Any) -> int:
    """Place of a scheduler node in the order of the graph, before fusion. For a fused node, that of
    its first part: what this part reads should not live until the turn of the last."""
    return int(snode.min_order)


def origins_of(snode: Any) -> list[Node]:
    """The FX nodes that a scheduler node was lowered from."""
    return list(getattr(snode.node, "origins", ()))
