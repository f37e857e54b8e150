"""The wrap: parameters become shards, and reading one gathers it.

Each module that owns parameters gets a subclass of its own class in which every parameter name is
a descriptor; the shards stay in ``_parameters`` under their own names. So ``named_parameters``,
``state_dict``, optimizers and ``isinstance`` see the plain model with sharded parameters, and
reading ``module.weight`` in forward is an all-gather that the compiler can see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from simplefsdp._torch import REPEATED, has_hooks, mend_gloo_gathers
from simplefsdp.frontend import tensor_class
from simplefsdp.frontend.after_wrap import is_original, mark_original, refuse_steps
from simplefsdp.frontend.arguments import (
    Dtypes,
    check_arguments,
    check_modules,
    dtypes_of,
    ignored_among,
    without_override,
)
from simplefsdp.frontend.assigned import refuse_assigned
from simplefsdp.frontend.full_tensor import reduce_gradients_of_full_tensors
from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.frontend.layerdrop import keep_layers
from simplefsdp.frontend.living import remember_fqns
from simplefsdp.frontend.outside import handle_operators
from simplefsdp.frontend.parametrization import cast_in_forward, computes_with_parts, use_subclass
from simplefsdp.frontend.placement import (
    DataParallel,
    all_ranks,
    data_parallel,
    is_float8,
    local_part,
    parameter_like,
    shard,
    tensor_parallel_of,
)
from simplefsdp.frontend.post_forward_groups import after_forward
from simplefsdp.frontend.shard_dims import PlacementFn, shard_dims, tell_of_padding
from simplefsdp.frontend.wrapped import (
    DEFERRALS,
    IGNORED,
    KEPT,
    SPLIT_BESIDE,
    ParameterLayout,
    is_wrapped,
    layouts_of,
    set_layouts,
    wrapped_parts,
)
from simplefsdp.rank_guard import agree, have_the_same, ranks_of, waiting_s
from simplefsdp.rank_logging import say


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | Literal["auto"] = True,
    ignored_params: Collection[nn.Parameter] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Shard every parameter of ``model`` over ``mesh``, in place, and return it.

    Rank 0's values are everybody's; a model built under ``torch.device("meta")`` stays there
    until :func:`simplefsdp.init_weights`, and if it is there on some ranks only, nothing is sent.
    A submodule may be wrapped before its parent, with another mesh or policy: the parent then
    leaves it as it is. Parameters that tensor parallelism made DTensors are sharded further. Make
    the optimizer, and register hooks on parameters, after the wrap: the parameters are new objects,
    on the mesh's type of device. To write values outside of forward use ``copy_``, ``fill_`` and
    the like: what is assigned by ``param.data = values`` is lost, as for every DTensor; the next
    forward raises.

    Args:
        model: the module; its parameters become DTensors of the true global shape.
        mesh: 1-D, or 2-D ``(replicate, shard)`` for ``hybrid_shard``. Default: all ranks, on the
            machine's accelerator, if it has one.
        mode: ``"fully_shard"`` (ZeRO-3), ``"hybrid_shard"``, or ``"replicate"`` (DDP).
        mp_policy: PyTorch's own. Parameters are cast to ``param_dtype`` before the gather and
            gradients to ``reduce_dtype`` before the reduce (if it is None, to what this torch's
            FSDP2 takes: since 2.15 the parameter's own dtype, before ``param_dtype``); the model's
            floating-point inputs are cast to ``param_dtype`` if ``cast_forward_inputs``, its
            outputs to ``output_dtype``.
        reshard_after_forward: free full parameters after forward and gather them again in
            backward. A number, as FSDP2's: each rank keeps a part of the full parameter, and
            backward gathers it from so many neighbours, those of one machine, say; it divides the
            ranks that share the shards. ``"auto"``: the planner of ``bucketing="auto"`` keeps those
            that save time and for which the memory budget has room, and, if torchrun has started
            several machines, of the others a part on each rank of a machine, likewise. Takes effect
            in ``torch.compile(model, backend="simplefsdp")``; other backends gather twice in
            forward if it is a number.
        ignored_params: parameters of ``model`` that stay as they are: whole, where they are, and
            with the gradient of this rank's batch alone.
        shard_placement_fn: as FSDP2's, for parameters that are not to be sharded along their first
            dimension: gets each and gives its ``Shard(dim)``, or None for ``Shard(0)``. The
            dimension need not divide evenly.
        offload_policy: as FSDP2's, if it offloads nothing.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: wrong mode or mesh, a second wrap, or a parameter that cannot be sharded.
        RankMismatchError: the ranks of ``mesh`` gave different models or arguments.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    check_arguments(model, policy, reshard_after_forward, offload_policy)
    mesh = all_ranks() if mesh is None else mesh
    dp = data_parallel(mesh, mode)
    mend_gloo_gathers()
    own = {module: path for path, module in model.named_modules() if not is_wrapped(module)}
    ignored = ignored_among(model, ignored_params)
    originals = _parameters_of(own, ignored)
    check_modules(own)
    for fqn, param in originals.values():
        _check_parameter(fqn, param)
    for module, path in own.items():
        _refuse_second_reference(module, path, originals)
    dims = shard_dims(originals, shard_placement_fn)
    shard_ranks = dp.group_of(dp.shard_dim)[1]
    values = {
        key: tensor_class.held_by(fqn, local_part(param), shard_ranks)
        for key, (fqn, param) in originals.items()
    }
    dtypes = {key: dtypes_of(fqn, param, policy) for key, (fqn, param) in originals.items()}
    policy = without_override(policy)
    agree(
        "the model given to simple_fsdp",
        [f"mode={mode} {policy} reshard_after_forward={reshard_after_forward}"]
        + [
            f"{fqn}: {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
            for fqn, p in originals.values()
        ]
        + [
            f"{fqn}: {dtypes[key]} Shard({dims[key]}) {values[key].name}"
            for key, (fqn, _) in originals.items()
        ],
        ranks_of([mesh]),
        remember=False,  # this rank may wrap an equal model again, and another rank a new one
    )
    sends = _alike_on_meta(originals, ranks_of([mesh]))
    resharding = after_forward(dp, reshard_after_forward)
    layouts = {
        key: _layout(fqn, param, dp, dims[key], dtypes[key], resharding, values[key].name)
        for key, (fqn, param) in originals.items()
    }
    if any(value.name for value in values.values()):
        tensor_class.note_mesh(dp.shard_mesh())
    shards = {
        key: parameter_like(
            param, shard(values[key].tensor, dp, layouts[key].tensor_parallel, dims[key], sends)
        )
        for key, (_, param) in originals.items()
    }
    refuse_assigned((layouts[key].spec.fqn, param) for key, param in shards.items())
    # Nothing above changed the model, so an error there leaves it as it was.
    for module in own:
        _install(module, layouts, shards)
        _move_buffers(module, mesh.device_type)
    keep_layers(own)
    refuse_steps()
    tell_of_padding(originals, dims, shard_ranks)
    for fqn, param in originals.values():
        mark_original(param, fqn)
    _mark_tensor_parallel(model)
    _mark_repeated(model)
    model.__dict__[IGNORED] = tuple(
        fqn for fqn, p in model.named_parameters(remove_duplicate=False) if id(p) in ignored
    )
    cast_in_forward(model, policy)
    _requalify(model)
    remember_fqns(model)
    handle_operators()
    reduce_gradients_of_full_tensors()
    return model


_MANY = 4  # layers in a list, from which on it is worth looking whether they are alike

Originals = dict[int, tuple[str, nn.Parameter]]


def _parameters_of(modules: Mapping[nn.Module, str], ignored: set[int]) -> Originals:
    """Each distinct parameter under its first FQN, keyed by identity: a tied one comes once."""
    found: Originals = {}
    for module, path in modules.items():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                found.setdefault(id(param), (f"{path}.{name}" if path else name, param))
    return found


def _alike_on_meta(originals: Originals, ranks: tuple[int, ...]) -> bool:
    """Whether the same parameters are on meta on all ranks. FSDP2's users may make the model on
    rank 0 alone, wrap it, and then have its values sent."""
    on_meta = [fqn for fqn, param in originals.values() if param.is_meta]
    alike = have_the_same("what is on meta", "\n".join(on_meta), ranks, waiting_s())
    if not alike:
        say(
            "simple_fsdp: parameters are on meta on some ranks and have values on others, so each "
            "rank keeps its part of what it has; give all ranks values, by "
            "set_model_state_dict(..., broadcast_from_rank0=True), say"
        )
    return alike


def _check_parameter(fqn: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.UninitializedParameter):
        raise ValueError(
            f"{fqn}: is not initialized (a lazy module); run one forward before simple_fsdp"
        )
    if param.requires_grad and is_float8(param.dtype):
        raise ValueError(
            f"{fqn}: is a trainable {param.dtype}: its gradient would be one, too, which no "
            "backend adds up and no optimizer takes; keep it in torch.bfloat16 and cast it in "
            "forward, or freeze it by requires_grad_(False) before simple_fsdp"
        )
    if is_original(param):
        raise ValueError(
            f"{fqn}: is tied to a parameter that an earlier simple_fsdp call sharded, and "
            "would come apart from it; wrap a module that holds both"
        )
    if has_hooks(param) or param.grad is not None:
        raise ValueError(
            f"{fqn}: has {'hooks' if param.grad is None else 'a gradient'}, which the "
            "sharded parameter would not have; set them after simple_fsdp"
        )


def _refuse_second_reference(module: nn.Module, path: str, originals: Originals) -> None:
    for attribute, value in module.__dict__.items():
        if attribute == "_flat_weights" and isinstance(module, nn.RNNBase):
            continue  # which is read anew from the parameters, see recurrent.py
        values = value.values() if isinstance(value, dict) else value
        held = values if isinstance(value, (list, tuple, dict)) else [value]
        stale = next((v for v in held if isinstance(v, Tensor) and id(v) in originals), None)
        if attribute != "_parameters" and stale is not None:
            raise ValueError(
                f"{originals[id(stale)][0]}: module {path or 'root'!r} "
                f"({type(module).__name__}) keeps a second reference to it in the attribute "
                f"{attribute!r}, which would go on holding the full, untrained tensor; read "
                "parameters by their registered name only"
            )


def _layout(
    fqn: str,
    param: nn.Parameter,
    dp: DataParallel,
    dim: int,
    dtypes: Dtypes,
    resharding: Mapping[str, Any],
    tensor_class_name: str,
) -> ParameterLayout:
    tp, local = tensor_parallel_of(param), local_part(param)
    shard_group, shard_ranks = dp.group_of(dp.shard_dim if local.dim() else None)
    # A scalar cannot be split: every rank of the mesh holds a copy.
    whole = dp.shard_dim if local.dim() == 0 else None
    spec = GatherSpec(
        fqn=fqn,
        rows=local.shape[dim] if shard_ranks > 1 else 0,
        shard_group=shard_group,
        shard_ranks=shard_ranks,
        reduce_group=shard_group,
        copy_groups=dp.groups_of(whole, dp.replicate_dim),
        param_dtype=dtypes.param_dtype,
        reduce_dtype=dtypes.reduce_dtype,
        averages=dp.averages,
        divide_factor=None,
        tensor_class=tensor_class_name,
        dim=dim if shard_ranks > 1 else 0,
        **resharding,
    )
    placements = dp.placements(dim if local.dim() else None)
    return ParameterLayout(
        spec, tp, param.shape, placements if tp is None else (*tp.placements, *placements)
    )


def _install(
    module: nn.Module, layouts: Mapping[int, ParameterLayout], shards: Mapping[int, nn.Parameter]
) -> None:
    own = {name: id(p) for name, p in module._parameters.items() if id(p) in layouts}
    set_layouts(module, {name: layouts[key] for name, key in own.items()})
    module.__dict__ |= {DEFERRALS: {}, KEPT: {}}
    if own or computes_with_parts(module):
        use_subclass(module, own)
    for name, key in own.items():
        module._parameters[name] = shards[key]


def _mark_tensor_parallel(model: nn.Module) -> None:
    """Note on every module the TensorParallel of the model's split parameters, if on one mesh."""
    wrapped = wrapped_parts(model)
    layouts = (layout for module in wrapped for layout in layouts_of(module).values())
    split = {tp.mesh: tp for layout in layouts if (tp := layout.tensor_parallel) is not None}
    for module in wrapped:
        module.__dict__[SPLIT_BESIDE] = next(iter(split.values())) if len(split) == 1 else None


def _move_buffers(module: nn.Module, device_type: str) -> None:
    """Bring buffers to where the shards went, as FSDP2 does; their values stay as they are."""
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta and buffer.device.type != device_type:
            module._buffers[name] = buffer.to(device_type)


def _mark_repeated(model: nn.Module) -> None:
    """Mark the members of lists of layers: the compiler may trace one for all. A layer that shares
    a module with another one is not marked, for Dynamo knows that module by one of its names."""
    owners = Counter(id(child) for module in model.modules() for child in module.children())
    for container in model.modules():
        layers = list(container.children())
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(layers) >= _MANY:
            for layer in layers:
                is_shared = any(owners[id(module)] > 1 for module in layer.modules())
                if not is_shared and any(True for _ in layer.parameters()):
                    layer.__dict__[REPEATED] = True


def _requalify(model: nn.Module) -> None:
    """Name inner modules' parameters as seen from ``model``, the outermost wrap so far."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        layouts = dict(layouts_of(module))
        for name, layout in layouts.items():
            if not isinstance(module._parameters.get(name), DTensor):
                continue  # it was taken away since it was wrapped
            fqn = f"{path}.{name}" if path else name
            fqn = names.setdefault(id(module._parameters[name]), fqn)
            layouts[name] = replace(layout, spec=layout.spec._replace(fqn=fqn))
        set_layouts(module, layouts)
