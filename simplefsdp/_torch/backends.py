"""Compiles a Dynamo graph with AOTAutograd and Inductor, and runs our passes on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule

from inductor_passes.adapters._torch_code import run_below_autograd
from inductor_passes.adapters._torch_lowering import reuse_at_once
from inductor_passes.adapters.strides import take_strides_of_inputs
from simplefsdp._torch.cache_files import broken_files_removed
from simplefsdp._torch.cpp_kernels import compiled_beside, kernels_together
from simplefsdp._torch.cut import Cut, cut_in_two, partitioner
from simplefsdp._torch.graph_key import wrappers
from simplefsdp._torch.one_graph import AS_ONE, AsOne, as_if_cut, partitioning
from simplefsdp._torch.padding import padding_without_benchmarks
from simplefsdp._torch.saved_code import giving_entry
from simplefsdp._torch.system_info import triton_by_version
from simplefsdp._torch.users_passes import GraphPass, after_the_users

CompiledFunction = Callable[..., Any]

_LOSES_MESHES = torch.__version__ >= "2.12"  # seen in 2.14 and 2.15, not in 2.11


class Passes(NamedTuple):
    """Our passes, which Inductor runs."""

    before: GraphPass  # mutates the joint graph before Inductor does
    joint: GraphPass  # mutates the joint graph after that, before it is partitioned
    # Mutates the forward and the backward graph just before they are lowered.
    graph: GraphPass | None
    # Permutes Inductor's scheduler nodes, last of all. Its pickle becomes part of the FX-graph
    # cache's key.
    scheduler: Callable[[list[Any]], list[Any]] | None
    # Identifies the graph passes and all that they depend on, for that key; called only after the
    # graph has been observed.
    uuid: Callable[[], str]


class Results(NamedTuple):
    """The functions that receive compiled code."""

    # Called for each graph: with whether it is the backward, and with its code.
    code: Callable[[bool, Any], None]
    # Called when all graphs are compiled, with an entry that ``saved_code.py`` can save; may be
    # None.
    entry: Callable[[Any], None] | None


NO_RESULTS = Results(lambda is_backward, code: None, None)


def has_settings_for_whole_graphs() -> bool:
    """Whether the user has set Inductor to run passes over, or wrap the code of, whole graphs."""
    passes = (config.post_grad_custom_pre_pass, config.post_grad_custom_post_pass)
    return any(wrappers().values()) or any(of_user is not None for of_user in passes)


def refuse_settings(executor: str) -> None:
    """Raise a ValueError for settings of the user's that torch does not support for such graphs; it
    would end in an error that names neither the setting nor a remedy."""
    if dynamo_config.caching_precompile:
        raise ValueError(
            "torch._dynamo.config.caching_precompile is set: it stores functions by their names in "
            "their modules, which the forward of a wrapped model does not have. Unset it "
            "(TORCH_CACHING_PRECOMPILE); torch.compiler.save_cache_artifacts() stores what is "
            "compiled"
        )
    if executor == "inductor" and config.cpp_wrapper and _LOSES_MESHES:
        raise ValueError(
            "torch._inductor.config.cpp_wrapper is set: the code that it makes loses the meshes of "
            "DTensors (a bug of torch, also without simplefsdp). Pass options={'executor': "
            "'regions'}, or unset it (TORCHINDUCTOR_CPP_WRAPPER)"
        )


def compile_with_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    passes: Passes,
    *,
    observe: Callable[[GraphModule, bool], CompiledFunction | None],
    lowering: Callable[[], AbstractContextManager[None]],
    cudagraphs: bool,
    results: Results = NO_RESULTS,
    cut: Cut | AsOne | None = None,
) -> CompiledFunction:
    """Compile ``gm`` with Inductor, whose settings are patched for this compilation only.

    Args:
        gm: the graph; it is changed.
        example_inputs: its inputs.
        passes: our passes.
        observe: called with each graph before it is lowered, and with whether it is the backward;
            also if the code comes from a cache. If it returns a function, that is the compiled
            graph: Inductor and the later passes do not see this graph.
        lowering: makes the context in which each graph is lowered.
        cudagraphs: True to capture each graph as a CUDA graph; False to leave Inductor's setting.
        results: receives the compiled code.
        cut: changes the joint graph around its partition, only if :func:`can_cut`; or ``AS_ONE``
            for a graph with its own backward, see ``one_graph.py``.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    static: set[str] = set()

    def inner_compile(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward", False))
        if cut == AS_ONE:
            graph = as_if_cut(graph, kwargs.get("static_input_idxs") or ())
        take_strides_of_inputs(graph.graph, inputs)
        with broken_files_removed(), kernels_together(), triton_by_version(graph, inputs):
            with config.patch(users):
                code: Any = observe(graph, is_backward)
            if code is None:
                kwargs["static_input_idxs"] = _static_inputs(graph, kwargs, static)
                with _stable_mesh_hashes(inputs), reuse_at_once(), lowering():
                    code = compile_fx_inner(graph, inputs, **kwargs)  # type: ignore[arg-type]
                run_below_autograd(code, graph)
        results.code(is_backward, code)
        return code

    graph_pass, scheduler, uuid = passes.graph, passes.scheduler, passes.uuid
    patches = _joint_patches(passes, cut) | _ORDER_STAYS
    if graph_pass is not None:
        patches |= after_the_users("post_grad_custom_post_pass", graph_pass, uuid)
        patches |= _TORCH_BUCKETING_OFF
    if scheduler is not None:
        patches |= _scheduler_patches(scheduler)
    if cudagraphs:
        patches |= {"triton.cudagraphs": True}
    known = config.get_config_copy()
    patches = {key: value for key, value in patches.items() if key in known}
    users = {key: getattr(config, key) for key in patches}
    # Torch's own lookup would skip tracing, and with it `observe`.
    with (
        giving_entry(results.entry),
        padding_without_benchmarks(),
        partitioning(),
        broken_files_removed(),
        compiled_beside(),
    ):
        whole = compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)
    return cast(CompiledFunction, whole)


def _joint_patches(passes: Passes, cut: Cut | AsOne | None) -> dict[str, Any]:
    patches = after_the_users("joint_custom_post_pass", passes.joint, passes.uuid)
    if isinstance(cut, Cut):
        patches |= partitioner(cut, passes.uuid)

    def before(graph: Graph) -> None:
        if isinstance(cut, Cut):
            cut.before(graph)
        passes.before(graph)

    return patches | after_the_users("joint_custom_pre_pass", before, passes.uuid)


def _static_inputs(graph: GraphModule, kwargs: dict[str, Any], static: set[str]) -> list[int]:
    """Indices of the inputs whose addresses stay the same from step to step, which need no copy.

    Torch 2.15 counts the backward's inputs without the device meshes that DTensors bring along, and
    so marks the wrong ones. We find them by name: the forward's names are added to ``static``."""
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    places = set(kwargs.get("static_input_idxs") or ())
    if kwargs.get("is_backward", False):
        return sorted(places | {i for i, name in enumerate(names) if name in static})
    static.update(names[i] for i in places)
    return sorted(places)


# This pass, on by default since 2.14, runs last: it would launch earlier and wait later than
# planned. With ``bucketing="none"``, too, collectives are to stay where they are in the graph.
_ORDER_STAYS = {"aten_distributed_optimizations.enable_simple_overlap": False}

# Torch's own bucketing passes run after ours, and would bucket our buckets again.
_TORCH_BUCKETING_OFF = {
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}


def _scheduler_patches(scheduler_pass: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    patches = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [scheduler_pass],
        # If a pass like this is set, 2.12 compares the graphs of all ranks by a collective during
        # compilation. A rank that finds its code in the cache would never join the collective.
        "aten_distributed_optimizations.spmd_check": False,
    }
    if config.deterministic:
        # The scheduler then skips our pass, so the order of the FX graph must be kept.
        patches["reorder_for_peak_memory"] = False
    return patches


@contextmanager
def _stable_mesh_hashes(inputs: Sequence[Any]) -> Iterator[None]:
    """Keep the FX-graph cache warm across processes.

    Since 2.12 the meshes of DTensors are inputs of a graph, and the cache's key is a pickle that
    holds ``DeviceMesh._hash``: Python's hash of strings and None, which differs between processes.
    A mesh also holds other meshes: the one it was sliced from, and those flattened from that one.
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


def compile_with_aot_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    observe: Callable[[GraphModule, bool], None],
    joint_pass: GraphPass,
    graph_pass: GraphPass | None,
    compiled: Callable[[bool], None] = lambda is_backward: None,
    decompose: bool = False,
    cut: Cut | AsOne | None = None,
) -> CompiledFunction:
    """Partition ``gm`` into forward and backward and run both graphs as they are, op by op.

    Arguments are as for :func:`compile_with_inductor` and :class:`Passes`. With ``decompose`` the
    graphs consist of the ops that Inductor would get; they are for inspection, not to be run.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_graph(graph: GraphModule, inputs: Any, *, is_backward: bool) -> CompiledFunction:
        if cut == AS_ONE:
            joint_pass(graph.graph)
            graph = as_if_cut(graph)
        observe(graph, is_backward)
        if not decompose:
            make_runnable(graph, graph_pass)
        compiled(is_backward)
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if isinstance(cut, Cut):
            cut.before(joint.graph)
            joint_pass(joint.graph)
            return cut_in_two(cut, joint, inputs, **kwargs)
        joint_pass(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    decompositions: dict[Any, Any] = {}
    if decompose:
        from torch._inductor.decomposition import select_decomp_table

        from simplefsdp._torch.symbolic import without_whole_slices  # with the planner

        decompositions = without_whole_slices(select_decomp_table())
    backend = aot_autograd(
        fw_compiler=partial(compile_graph, is_backward=False),
        bw_compiler=partial(compile_graph, is_backward=True),
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    with partitioning():
        return backend(gm, example_inputs)  # type: ignore[no-any-return]


def make_runnable(graph: GraphModule, graph_pass: GraphPass | None) -> None:
    """Apply a pass, and replace each view by a reshape, which copies where no view is possible:
    some results have other strides than torch predicts, as of ``softplus_backward`` (2.11 to 2.15).
    """
    if graph_pass is not None:
        graph_pass(graph.graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()


def graphs_of(
    gm: GraphModule, example_inputs: Sequence[Any], joint_pass: GraphPass
) -> dict[bool, GraphModule]:
    """The forward (False) and backward (True) graph of ``gm``, of the ops that Inductor would get.

    Nothing runs. The graphs do not save the states of random generators for recomputed ops: torch
    does that in ways that differ by device, and can fail for the CPU's generator.
    """
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
