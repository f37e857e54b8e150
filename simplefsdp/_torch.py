"""Every private part of PyTorch that this package touches, behind a name of our own.

Each function here has a contract test in ``tests/test_torch_contract.py`` that fails first, and
says what moved, when a new release of PyTorch moves it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CodePlace",
    "GraphBreak",
    "TorchDispatchMode",
    "annotate_backward",
    "assigns_data",
    "breaks_the_graph",
    "cast_floating_point",
    "default_dtensor_op",
    "draws_globally",
    "dispatch_mode",
    "compile_modules_of_torch_too",
    "compile_with_aot_eager",
    "compile_with_inductor",
    "graph_break_of",
    "graphs_of",
    "grad_dtype_override",
    "handle_dtensor_op",
    "has_hooks",
    "has_no_data",
    "hash_of_files",
    "in_backward",
    "input_name",
    "is_allowed_in_graph",
    "is_checkpoint_region",
    "is_checkpointed_by_hooks",
    "is_split",
    "is_to_empty",
    "line_of",
    "local_of",
    "local_tensor",
    "module_path",
    "no_torch_function",
    "reduces_in_param_dtype",
    "place_being_compiled",
    "place_called",
    "run_as_it_is",
    "second_group",
    "sets_grad_mode",
    "shared_store",
    "storage_use_count",
    "trace_without",
    "tree_map_only",
]

# Where code is not the user's.
_OURS = str(Path(__file__).parent) + os.sep
_TORCHS = str(Path(torch.__file__).parent) + os.sep

CompiledFunction = Callable[..., Any]
GraphCompiler = Callable[[GraphModule, Sequence[Any]], CompiledFunction]
GraphPass = Callable[[Graph], None]


def is_checkpoint_region(node: Node) -> bool:
    """Whether a Dynamo node calls a body that the user checkpoints (``torch.utils.checkpoint``)."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def sets_grad_mode(node: Node) -> bool:
    """Whether a Dynamo node enters (``args == (False,)``) or leaves a ``no_grad`` block."""
    return node.target is torch._C._set_grad_enabled


def is_allowed_in_graph(function: Callable[..., Any]) -> bool:
    """Whether somebody gave a function, or a class, to ``torch.compiler.allow_in_graph``."""
    from torch._dynamo.trace_rules import is_callable_allowed

    return bool(is_callable_allowed(function))


def trace_without(cls: type[torch.Tensor]) -> None:
    """Let Dynamo leave alone what is done to tensors of ``cls``."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each leaf of that kind, in any nesting of containers."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(kind, function, value)


def run_as_it_is(function: Callable[..., Any]) -> None:
    """Let no call of ``function`` become a graph of its own, nor what it calls.

    Where Dynamo cannot take a frame, it goes on with each function that the frame calls. Called
    from a frame that it can take, ``function`` is traced as ever.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def left_alone_by_dynamo(error: Exception, frame: FrameType) -> Exception:
    """``error`` as an exception that a backend can raise and its user gets: same type, same words.

    Args:
        error: the exception.
        frame: where the part of its traceback begins that the user is to see.
    """
    alone: Exception = _left_alone(type(error))(str(error), first_useful_frame=frame)
    alone.__dict__.update(error.__dict__)
    return alone


def _left_alone(kind: type[Exception]) -> type[Any]:
    from torch._dynamo.exc import ShortenTraceback

    def __init__(self: Any, message: str, first_useful_frame: FrameType | None = None) -> None:
        Exception.__init__(self, message)
        self.first_useful_frame = first_useful_frame
        self._torch_dynamo_tracer_output = self.frame_exec_strategy = None
        self.message = message

    # Dynamo adds advice to the arguments, for those who debug it.
    members = {
        "__init__": __init__,
        "__str__": lambda self: self.message,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda self: (kind, (self.message,)),
    }
    return type(kind.__name__, (ShortenTraceback, kind), members)


def breaks_the_graph(error: BaseException) -> bool:
    """Whether Dynamo makes a graph break of ``error``, raised by a backend: an operator whose
    output depends on data, say, that AOTAutograd meets.

    It does not where the user allowed a function in the graph, as we allow ``gather``; from here
    on, for the graph that is being compiled, it does.
    """
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if not isinstance(error, exceptions_allowed_to_be_fallback):
        return False
    InstructionTranslator.current_tx().output.has_user_defined_allowed_in_graph = False
    return True


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph early, and where: frames outermost first."""

    reason: str
    stack: tuple[traceback.FrameSummary, ...]


def graph_break_of(gm: GraphModule) -> GraphBreak | None:
    """The graph break that ended this Dynamo graph, or None if it ran to the return."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return GraphBreak(reason.reason, tuple(reason.user_stack))


def compile_modules_of_torch_too(backend: str, function: str = "") -> None:
    """Have ``module.compile(backend=backend)`` compile a module of torch's own as one graph.

    Dynamo starts at no function of torch's, so ``nn.Sequential(...).compile()`` runs as it is, and
    the backend never hears of it. ``torch.compile(module)`` puts a function in front, where Dynamo
    starts; so does this, for ``backend`` only. If this is called because the backend is being
    looked up by such a ``compile``, it holds for that one, too. Since 2.15 torch does so itself.

    Args:
        backend: its name.
        function: full name of the function that it is, for who gives that.
    """
    if torch.__version__ >= "2.14":
        return
    original = nn.Module.compile

    def is_meant(given: Any) -> bool:
        if isinstance(given, str):
            return given == backend
        names = (getattr(given, part, "") for part in ("__module__", "__qualname__"))
        return bool(function) and ".".join(map(str, names)) == function

    @functools.wraps(original)
    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_meant(kwargs.get("backend")) and _is_torchs_own(self):
            self._compiled_call_impl = torch.compile(_in_front(self), *args, **kwargs)

    nn.Module.compile = compile_module  # type: ignore[assignment,method-assign]
    code = original.__code__
    frame = _frame_of(code)
    if frame is not None and is_meant(frame.f_locals["kwargs"].get("backend")):
        module = frame.f_locals["self"]
        if _is_torchs_own(module):
            _put_in_front_once(module, code)


def _frame_of(code: CodeType) -> FrameType | None:
    """The innermost call of ``code`` that is under way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _is_torchs_own(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS)


def _in_front(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _put_in_front_once(meant: nn.Module, compile_code: CodeType) -> None:
    """Of the ``torch.compile`` that ``compile_code``, under way for ``meant``, calls.

    What is replaced is called at its end. If it raises before, the next ``torch.compile``, be it
    somebody else's, finds the replacement, which then does nothing but take itself away.
    """
    import torch._dynamo

    original = torch._dynamo.optimize
    awaited = weakref.ref(meant)

    def optimize(*args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.optimize is optimize:
            torch._dynamo.optimize = original
        decorate = original(*args, **kwargs)
        caller = _frame_of(compile_code)
        module = awaited()
        if caller is None or module is None or caller.f_locals["self"] is not module:
            return decorate
        in_front = _in_front(module)

        def decorated(function: Any) -> Any:
            is_it = getattr(function, "__self__", None) is module
            return decorate(in_front if is_it else function)

        return decorated

    torch._dynamo.optimize = optimize


class CodePlace(NamedTuple):
    """What a function is known by, whatever Dynamo made of its code."""

    file: str
    line: int
    name: str


def _place_of(code: CodeType) -> CodePlace:
    return CodePlace(code.co_filename, code.co_firstlineno, code.co_name)


def place_being_compiled() -> CodePlace | None:
    """The function whose graph Dynamo hands to a backend now; None if it does not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return _place_of(InstructionTranslator.current_tx().f_code)
    except AttributeError:
        return None


def place_called() -> CodePlace | None:
    """The outermost of the functions that run compiled, which the user's call began with.

    None if none does: it is being compiled.
    """
    from torch._dynamo import convert_frame, eval_frame

    torchs = str(Path(torch.__file__).parent)
    found: CodePlace | None = None
    inner: CodePlace | None = None  # the last function on the way out that is not torch's own
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = _place_of(frame.f_code)
        if place.file == convert_frame.__file__:
            inner = None  # what the compiler has called
        elif place.file == eval_frame.__file__ and place.name == "compile_wrapper":
            found = inner
        elif not place.file.startswith(torchs):
            inner = place
        frame = frame.f_back
    return found


def assigns_data(cut: GraphBreak) -> bool:
    """Whether a graph broke at ``tensor.data = ...`` of a tensor that was made in it."""
    return cut.reason.startswith("Failed to mutate tensor data attribute")


def input_name(placeholder: Node) -> str | None:
    """FQN of a graph input that is a parameter, else its Python expression, or None."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = str(source.name() if callable(source.name) else source.name)
    # L['self']._modules['fc']._parameters['weight'] is fc.weight to the user.
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", name)) or name


@contextmanager
def annotate_backward(marks: dict[str, object]) -> Iterator[None]:
    """Mark the nodes that an autograd function's backward traces inside.

    Before 2.13, AOTAutograd replaced the marks of a backward node by those of the forward node it
    belongs to. It passes over nodes tagged as required in backward, which these are anyway.
    """
    meta = fx_traceback.current_meta
    # torch.__version__ is a TorchVersion: it compares as a version, not as a string.
    overwrites = torch.__version__ < "2.13" and "partitioner_tag" in meta
    before = meta.get("partitioner_tag")
    with fx_traceback.annotate(marks):
        if overwrites:
            meta["partitioner_tag"] = "must_be_in_backward"
        try:
            yield
        finally:
            if overwrites:
                meta["partitioner_tag"] = before


def module_path(node: Node) -> str | None:
    """FQN-like path and class of the innermost module that made ``node``, or None."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, cls = list(stack.values())[-1]
    path = re.sub(r"^L\['\w+'\]\.?(__self__\.?)?", "", path) or "the model"
    return f"{path} ({getattr(cls, '__name__', cls)})"


def line_of(node: Node | None) -> str:
    """Where the user's code made ``node``: the innermost frame of its trace, if it has one."""
    trace = node.stack_trace if node is not None else None
    lines = [line.strip() for line in (trace or "").splitlines()]
    others = (f'File "{_OURS}', f'File "{_TORCHS}')
    frames = [i for i, x in enumerate(lines) if x.startswith("File ") and not x.startswith(others)]
    return f" ({': '.join(lines[frames[-1] : frames[-1] + 2])})" if frames else ""


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to what ``TORCH_TRACE`` collects (tlparse shows it); nothing is made without."""
    torch._logging._internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )


def compile_with_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    observe: Callable[[GraphModule, bool], CompiledFunction | None],
    joint_pass: GraphPass,
    graph_pass: GraphPass | None,
    scheduler_pass: Callable[[list[Any]], list[Any]] | None,
    lowering: Callable[[], AbstractContextManager[None]],
    uuid: Callable[[], str],
) -> CompiledFunction:
    """Compile ``gm`` with Inductor, its settings patched for this compilation only.

    Args:
        gm: the Dynamo graph; owned by the callee.
        example_inputs: its (fake) inputs.
        observe: called with each graph before it is lowered, and whether it is the backward;
            called when the compiled code comes from a cache, too. If it gives a function, that is
            the compiled graph, and none of the passes below, nor Inductor, sees it.
        joint_pass: mutates the joint graph before it is partitioned.
        graph_pass: mutates the forward and the backward graph just before they are lowered.
        scheduler_pass: permutes Inductor's scheduler nodes, last of all. Its pickle becomes part
            of the FX-graph cache's key.
        lowering: makes a context that each graph is lowered in.
        uuid: identifies the other passes and all they depend on, for that key; asked for when
            a graph has been observed.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with config.patch(users):
            compiled = observe(graph, bool(kwargs.get("is_backward", False)))
        if compiled is not None:
            return compiled
        with _stable_mesh_hashes(inputs), lowering():
            return compile_fx_inner(graph, inputs, **kwargs)  # type: ignore[arg-type]

    patches = _after_the_users("joint_custom_post_pass", joint_pass, uuid) | _ORDER_STAYS
    if graph_pass is not None:
        patches |= _after_the_users("post_grad_custom_post_pass", graph_pass, uuid)
        patches |= _TORCH_BUCKETING_OFF
    if scheduler_pass is not None:
        patches |= _scheduler_patches(scheduler_pass)
    known = config.get_config_copy()
    patches = {key: value for key, value in patches.items() if key in known}
    users = {key: getattr(config, key) for key in patches}
    # The AOTAutograd cache would skip tracing, and with it `observe`; the FX-graph cache below it
    # is the one that saves the minutes of code generation.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm, example_inputs, inner_compile=inner_compile, config_patches=patches
        )
    return cast(CompiledFunction, compiled)


# On by default since 2.14 and the last of all: it launches earlier and waits later than planned.
# What is to run as it stands in the graph (``bucketing="none"``) is not to be moved either.
_ORDER_STAYS = {"aten_distributed_optimizations.enable_simple_overlap": False}

# Torch's own passes come after ours, and would bucket again what is bucketed.
_TORCH_BUCKETING_OFF = {
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}


def _scheduler_patches(scheduler_pass: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    from torch._inductor import config

    patches = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [scheduler_pass],
        # 2.12 compares the graphs of all ranks by a collective while it compiles, if a pass like
        # this is set: a rank that finds its code in the cache would never come to it.
        "aten_distributed_optimizations.spmd_check": False,
    }
    if config.deterministic:
        # The scheduler then skips our pass; the order of the FX graph must stand.
        patches["reorder_for_peak_memory"] = False
    return patches


@contextmanager
def _stable_mesh_hashes(inputs: Sequence[Any]) -> Iterator[None]:
    """Keep the FX-graph cache warm across processes.

    Since 2.12 the meshes of DTensors are inputs of a graph, and the cache's key is a pickle that
    holds ``DeviceMesh._hash``: Python's hash of strings and None, another one in every process. A
    mesh holds others: the one it was cut from, and those that were flattened from that one.
    """
    left = [getattr(value, "real_obj", value) for value in inputs]
    meshes: dict[int, DeviceMesh] = {}
    while left:
        mesh = left.pop()
        if isinstance(mesh, dict):
            left += mesh.values()
        elif isinstance(mesh, DeviceMesh) and id(mesh) not in meshes:
            meshes[id(mesh)] = mesh
            left += vars(mesh).values()
    before = {key: getattr(mesh, "_hash", None) for key, mesh in meshes.items()}
    for mesh in meshes.values():
        text = repr((mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names))
        mesh._hash = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    try:
        yield
    finally:
        for key, mesh in meshes.items():
            mesh._hash = before[key]


def _after_the_users(name: str, function: GraphPass, identity: Callable[[], str]) -> dict[str, Any]:
    """The setting that makes ``function`` a pass of Inductor's, which its caches can key on.

    It runs after the pass that the user has set under the same name, if there is one.
    """
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.custom_graph_pass import CustomGraphPass

    users = getattr(config, name)
    in_turn = users if isinstance(users, (list, tuple)) else [users] if users is not None else []

    class _Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            function(graph)

        def uuid(self) -> Any:
            return identity()

    if not in_turn:
        return {name: _Pass()}
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # since 2.13
        return {name: [*in_turn, _Pass()]}
    (first,) = in_turn

    class _Both(_Pass):
        def __call__(self, graph: Graph) -> None:
            first(graph)
            function(graph)

        def uuid(self) -> Any:
            theirs = first.uuid() if isinstance(first, CustomGraphPass) else None
            # None: a pass that no cache can know goes past the cache, as it does without us.
            return None if theirs is None else (theirs, identity())

    return {name: _Both()}


def compile_with_aot_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    observe: Callable[[GraphModule, bool], None],
    joint_pass: GraphPass,
    graph_pass: GraphPass | None,
    decompose: bool = False,
) -> CompiledFunction:
    """Partition ``gm`` into forward and backward and run both graphs as they are, op by op.

    Arguments as for :func:`compile_with_inductor`. With ``decompose`` the graphs are made of the
    ops that Inductor would get.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(is_backward: bool) -> GraphCompiler:
        def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> CompiledFunction:
            observe(graph, is_backward)
            if graph_pass is not None:
                graph_pass(graph.graph)
                graph.recompile()
            return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

        return compile_graph

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint_pass(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    decompositions: dict[Any, Any] = {}
    if decompose:
        from torch._inductor.decomposition import select_decomp_table

        decompositions = select_decomp_table()
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    return backend(gm, example_inputs)  # type: ignore[no-any-return]


def graphs_of(
    gm: GraphModule, example_inputs: Sequence[Any], joint_pass: GraphPass
) -> dict[bool, GraphModule]:
    """The forward (False) and backward (True) graph of ``gm``, of the ops that Inductor would get.

    Nothing runs. The state of no random generator is stashed for what the backward recomputes:
    torch does that in ways that differ by device, and can fail on the CPU's.
    """
    from unittest.mock import patch

    from torch._functorch import config as functorch_config
    from torch._functorch import partitioners

    graphs: dict[bool, GraphModule] = {}

    def observe(graph: GraphModule, is_backward: bool) -> None:
        graphs[is_backward] = graph

    with (
        patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        compile_with_aot_eager(
            gm,
            example_inputs,
            observe=observe,
            joint_pass=joint_pass,
            graph_pass=None,
            decompose=True,
        )
    return graphs


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of ``tensor``, or for its accumulation."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(hooks)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is only a shape: on meta, or fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def storage_of(value: object) -> int | None:
    """What tells a fake tensor's storage from others; None for anything else."""
    from torch._subclasses.fake_tensor import FakeTensor

    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None


def fake_again(tensor: Any, owner: torch.Tensor | None) -> torch.Tensor:
    """A fake tensor like ``tensor``, on the storage of ``owner``, or on one of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    nbytes = tensor.untyped_storage().nbytes()
    storage = torch.UntypedStorage(nbytes, device="meta")
    if owner is not None:
        storage = owner.untyped_storage()
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    return FakeTensor(tensor.fake_mode, meta, tensor.device)


def shared_store(prefix: str) -> Any:
    """The key-value store that all ranks of the default process group share, under ``prefix``."""
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


_second_groups: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def second_group(name: str) -> str:
    """Name of another process group, and so another communicator, of the ranks of group ``name``.

    The first call for a group is collective among its ranks, and only those.
    """
    from torch.distributed import distributed_c10d

    group = distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]
    if group not in _second_groups:
        ranks = distributed_c10d.get_process_group_ranks(group)
        second: Any = distributed_c10d.new_group(  # since 2.15 its type has a number in it
            ranks,
            backend=distributed_c10d.get_backend_config(group),
            use_local_synchronization=True,
        )
        _second_groups[group] = second.group_name
    return _second_groups[group]


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Let ``torch.compiler.reset()`` call ``backend.reset()``, if it has one.

    Dynamo calls it for what ``torch.compile`` was called for since the last reset; not for what
    was compiled again after it.
    """
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(backend), backend)


def hash_of_files(files: Sequence[str]) -> str:
    """Hash of the contents of source files, to key a cache on the code that made its entries."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(files)).hex()


def reduces_in_param_dtype() -> bool:
    """Whether this torch's FSDP2 reduces in ``param_dtype`` where no ``reduce_dtype`` is given.

    Since 2.15 it reduces in the parameter's own dtype, or in its ``grad_dtype`` if one is set.
    """
    return torch.__version__ < "2.15"


class GradDtype(NamedTuple):
    """A ``grad_dtype`` that the user has set; None accepts gradients of any dtype."""

    dtype: torch.dtype | None


def grad_dtype_override(param: torch.Tensor) -> GradDtype | None:
    """The ``grad_dtype`` of a parameter if the user has set one, and this torch can tell."""
    is_set = getattr(param, "_has_grad_dtype_override", False)  # since 2.15
    return GradDtype(param.grad_dtype) if is_set else None


def cast_floating_point(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors cast to ``dtype``.

    Any nesting of containers, and of dataclasses, which are made anew.
    """
    from torch.utils import _pytree as pytree

    def cast_one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [f.name for f in dataclasses.fields(leaf) if f.init]
            changes = {n: cast_floating_point(getattr(leaf, n), dtype) for n in names}
            return dataclasses.replace(leaf, **changes)
        return leaf

    return pytree.tree_map(cast_one, value)


DTensorOp = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def handle_dtensor_op(op: Callable[..., Any], handler: DTensorOp) -> None:
    """Have ``handler(op, args, kwargs)`` called for an operator whose arguments are DTensors."""
    _dtensor_handlers().setdefault(op, handler)


def default_dtensor_op(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a handled operator of DTensors does without its handler."""
    handlers = _dtensor_handlers()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def _dtensor_handlers() -> dict[Any, DTensorOp]:
    return DTensor._op_dispatcher._custom_op_handlers  # type: ignore[return-value]


def draws_globally(mesh: DeviceMesh) -> bool:
    """Whether torch draws random DTensors on ``mesh`` as one global tensor; on CPU it does not."""
    from torch.distributed.tensor._random import is_rng_supported_mesh

    return mesh.device_type != "cpu" and is_rng_supported_mesh(mesh)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What a DTensor holds on this rank, as ``to_local()``, but nothing is dispatched."""
    return tensor._local_tensor


def local_of(param: DTensor) -> torch.Tensor:
    """``param.to_local()``; the gradient that comes back is laid out as ``param``, on every rank.

    torch does so since 2.12. 2.11 takes the strides of the whole from the local gradient; where
    they are not the parameter's, as those of an empty one, autograd gathers the gradient, on that
    rank alone, which then waits for ever. It also cuts off what ``create_graph`` asks for.
    """
    if torch.__version__ >= "2.12":
        return param.to_local()
    return cast(torch.Tensor, _LocalOf.apply(param))


class _LocalOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> torch.Tensor:
        ctx.place = (param.device_mesh, param.placements)
        ctx.whole = {"shape": param.shape, "stride": param.stride()}
        local = param._local_tensor
        ctx.contiguous = local.is_contiguous()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        grad = grad.contiguous() if ctx.contiguous else grad
        return DTensor.from_local(grad, *ctx.place, run_check=False, **ctx.whole)


def is_checkpointed_by_hooks(module: nn.Module) -> bool:
    """Whether somebody gave ``module`` to ``torch.distributed._composable.checkpoint``."""
    from torch.distributed._composable.contract import _get_registry

    return "checkpoint" in (_get_registry(module) or {})


def in_backward() -> bool:
    """Whether this thread runs inside autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def dispatch_mode() -> str | None:
    """Class name of the innermost dispatch mode of the user's, or None; Dynamo stays out then."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    users = [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    return type(users[-1]).__name__.lstrip("_") if users else None


def no_torch_function() -> AbstractContextManager[None]:
    """Inside, ``__torch_function__`` of tensor subclasses is not asked."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def is_split(placement: Placement) -> bool:
    """Whether a placement gives each rank elements of its own, strided or not."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, (Shard, _StridedShard))


def is_to_empty(fn: Callable[..., Any]) -> bool:
    """Whether ``fn``, that ``Module._apply`` was given, is that of ``Module.to_empty``."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors, views and storage objects refer to the memory of ``tensor``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
