"""A key for a Dynamo graph together with everything in torch that its compilation depends on.

A graph has no key if there is any doubt: if it calls a function that is neither torch's nor ours,
since somebody may change that and keep its name; if a value's text does not describe it completely;
or if the graph holds a tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from simplefsdp._torch.dynamo import has_policy
from simplefsdp._torch.system_info import triton_by_version

OURS = ("simplefsdp", "inductor_passes")
_OPERATORS = {"aten", "prims", "_c10d_functional", "inductor"}
_PLAIN = (int, str, bool, bytes, complex, type(None), type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, Placement)
_META = ("custom", "recompute", "ac_graph_id")


class UnknownGraphError(Exception):
    """No text describes everything that a compilation depends on, so there is no key."""


def key_of_graph(
    gm: GraphModule, example_inputs: Sequence[Any], more: Sequence[str], gather: Any
) -> str:
    """A key that is equal only for compilations that give the same code. It covers a graph, its
    inputs, and the lines of ``more``, which are all else that the code depends on. ``gather`` is a
    function in graphs that does not depend on the rank. Raises UnknownGraphError if there is no
    such key."""
    settings, inputs = _settings(gm, example_inputs), _inputs(gm, example_inputs, gather)
    lines = itertools.chain(more, settings, inputs, _nodes(gm))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def meshes_of(example_inputs: Sequence[Any]) -> list[DeviceMesh]:
    """The device meshes of parameters, in the order of their first uses."""
    found = [value.device_mesh for value in example_inputs if isinstance(value, DTensor)]
    return list({id(mesh): mesh for mesh in found}.values())


def _settings(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[str]:
    """torch's version and settings, and the machine, as torch's own caches key on them; then the
    settings that those caches leave out."""
    from torch._inductor.codecache import FxGraphCache, FxGraphCachePickler, FxGraphHashDetails

    _refuse_settings()
    try:
        FxGraphCache._check_can_cache(gm, example_inputs, {})
        with triton_by_version(gm, example_inputs):
            details = FxGraphHashDetails(gm, example_inputs, {}, [])
        vars(details).update(gm=None, example_inputs=())  # _nodes and _inputs cover these
        yield FxGraphCachePickler(gm).get_hash(details)
    except Exception as error:
        raise UnknownGraphError(f"torch's settings have no key: {error}") from error
    functorch = functorch_config.save_config_portable(ignore_private_configs=False)
    yield repr(sorted(functorch.items(), key=str))
    backends = torch.backends
    yield repr(
        [
            *(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in torch._C._autocast_supported_devices()
            ),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
            backends.mkldnn.enabled,
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
            backends.cudnn.enabled,
            backends.cudnn.deterministic,
        ]
    )


def wrappers() -> dict[str, bool]:
    """Inductor's settings that wrap the code of a graph, and whether the user has set them."""
    return {
        "triton.cudagraphs": config.triton.cudagraphs,
        "cpp_wrapper": config.cpp_wrapper,
        "fx_wrapper": config.fx_wrapper,
    }


def _refuse_settings() -> None:
    """Refuse settings that no text describes, and those under which code is not saved."""
    refused = {
        "joint_custom_pass": functorch_config.joint_custom_pass is not None,
        "enable_autograd_cache": not functorch_config.enable_autograd_cache,
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "cudagraph_policy": config.cudagraph_policy,
        **wrappers(),
    }
    if found := [name for name, is_so in refused.items() if is_so]:
        raise UnknownGraphError(f"torch's settings: {', '.join(found)}")


def _inputs(gm: GraphModule, example_inputs: Sequence[Any], gather: Any) -> Iterator[str]:
    if dist.is_initialized():
        rank = "any" if _is_of_any_rank(gm, example_inputs, gather) else dist.get_rank()
        yield f"rank {rank} of {dist.get_world_size()}"
    yield from (_of_mesh(mesh) for mesh in meshes_of(example_inputs))
    tensors = [getattr(v, "_local_tensor", v) for v in example_inputs if isinstance(v, Tensor)]
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        raise UnknownGraphError("inputs are views of one tensor")
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        static = getattr(node.meta.get("example_value"), "_dynamo_static_input_type", None)
        yield f"{node.name} {_value(value)} {static}"


def _is_of_any_rank(gm: GraphModule, example_inputs: Sequence[Any], gather: Any) -> bool:
    """Whether the code is the same on all ranks that have equal shards and groups. In doubt it is
    not, nor on a GPU, whose index is in the code. Operators on a DTensor depend on the rank's place
    in the mesh; ``gather`` of a parameter does not."""
    if any(v.device.type != "cpu" for v in example_inputs if isinstance(v, Tensor)):
        return False

    def is_fine(node: Node) -> bool:
        if node.op == "get_attr":
            return all(map(is_fine, _submodule(gm, node).graph.nodes))
        if node.op == "output":
            return True
        if node.op == "placeholder" and all(user.target is gather for user in node.users):
            return True
        return "example_value" in node.meta and not _has_dtensor(node.meta["example_value"])

    return all(map(is_fine, gm.graph.nodes))


def _has_dtensor(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))


def _of_mesh(mesh: DeviceMesh) -> str:
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    members = [(group.group_name, dist.get_process_group_ranks(group)) for group in groups]
    return repr((mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, members))


def _nodes(gm: GraphModule) -> Iterator[str]:
    if has_policy(gm) or gm.meta.get("cudagraph_annotation") is not None:
        raise UnknownGraphError("a graph with a policy of the user's")
    number = {node: i for i, node in enumerate(gm.graph.nodes)}

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{number[value]}"
        return _text(value, text)

    for node in gm.graph.nodes:
        stack = [
            (path, str(kind)) for path, kind in (node.meta.get("nn_module_stack") or {}).values()
        ]
        marks = [(key, str(node.meta[key])) for key in _META if key in node.meta]
        values = [_value(v) for v in pytree.tree_leaves(node.meta.get("example_value"))]
        arguments = "" if node.op == "placeholder" else f"{text(node.args)} {text(node.kwargs)}"
        yield f"{node.op} {node.name} {_target(gm, node)} {arguments} {values} {stack} {marks}"
        if node.op == "get_attr":
            yield from _nodes(_submodule(gm, node))


def _submodule(gm: GraphModule, node: Node) -> GraphModule:
    found = gm.get_submodule(str(node.target)) if hasattr(gm, str(node.target)) else None
    if not isinstance(found, GraphModule):
        raise UnknownGraphError(f"{node.target} is held by the graph")
    return found


def _target(gm: GraphModule, node: Node) -> str:
    target: Any = node.target
    if node.op == "call_module":
        raise UnknownGraphError(f"{target} is called as a module")
    if node.op != "call_function":
        return str(target)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        if str(target).partition(".")[0] not in _OPERATORS:  # its gradient may be changed
            raise UnknownGraphError(f"{target} is none of torch's own operators")
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()  # _settings has asked FxGraphCache whether it can be cached
    return _function(node, target)


def _function(node: Node, target: Any) -> str:
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe

    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    root = module.partition(".")[0]
    if root in OURS and "<" not in name:
        return f"{module}.{name}"
    if root not in ("torch", "math", "_operator", "builtins"):
        raise UnknownGraphError(f"{target} is neither torch's nor ours")
    try:
        check_node_safe(node)
    except Exception as error:
        raise UnknownGraphError(str(error)) from error
    return f"{module}.{name} {getattr(target, '__self__', '')!s}"


def _text(value: Any, text: Any) -> str:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()  # 0.0 and -0.0 are not the same
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text(k)}: {text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
    if isinstance(value, DeviceMesh):
        return _of_mesh(value)
    if type(value) in _PLAIN or (isinstance(value, _OF_TORCH) and _is_of_torch(value)):
        return f"{type(value).__name__} {value!r}"
    raise UnknownGraphError(f"a {type(value).__name__} in the graph")


def _value(value: Any) -> str:
    """The text of an input, or of a value that Dynamo saw."""
    if type(value) is DTensor:
        placements = _text(value.placements, _value)
        whole = f"{_layout(value)} {placements} {_of_mesh(value.device_mesh)}"
        return f"{whole} of {_value(value._local_tensor)}"
    if isinstance(value, Tensor):
        return _layout(value)
    return _text(value, _value)


def _layout(value: Tensor) -> str:
    if not _is_of_torch(value):
        raise UnknownGraphError(f"a {type(value).__name__}")
    grad = value.requires_grad, value.is_leaf
    layout = (*value.shape,), value.layout, value.dtype, value.device, grad
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *_strides(value))):
        raise UnknownGraphError("open sizes")
    return repr((type(value).__name__, *layout, _strides(value), value.is_conj(), value.is_neg()))


def _strides(value: Tensor) -> tuple[Any, ...]:
    return (*value.stride(), value.storage_offset()) if value.layout is torch.strided else ()


def _is_of_torch(value: object) -> bool:
    """Whether a value's class is torch's or ours, so that no code of others is behind it."""
    return type(value).__module__.partition(".")[0] in ("torch", *OURS)
