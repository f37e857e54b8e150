"""The parametrization: on a wrapped module, reading a parameter in forward gathers it.

Each module that owns parameters becomes an instance of a subclass of its own class, in which every
parameter name is a descriptor. There is one subclass per original class, whatever the number of
instances (Dynamo would recompile for each class); what differs between instances lives on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from simplefsdp._torch import is_to_empty, run_as_it_is
from simplefsdp.frontend import (
    containers,
    control,
    forwards,
    generation,
    hints,
    init_flow,
    kept,
    living,
    loaded,
    plain_values,
    recurrent,
    refused,
    uninitialised,
)
from simplefsdp.frontend.accumulation import (
    begin_anew,
    carry_over,
    deferral_of,
    note_backward,
    sums_stay,
)
from simplefsdp.frontend.after_wrap import note_replaced
from simplefsdp.frontend.assigned import forget_seen, refuse_assigned, refuse_assigned_since
from simplefsdp.frontend.eager_guard import note_gather
from simplefsdp.frontend.equal_classes import equal_to_plain
from simplefsdp.frontend.gather import ON_META, gather
from simplefsdp.frontend.placement import local_part
from simplefsdp.frontend.reading import (
    accessors,
    in_forward,
    in_traced_forward,
    is_marked,
    marked,
    plain_method,
    read_only,
)
from simplefsdp.frontend.wrapped import (
    DEFERRALS,
    GATHERS,
    KEPT,
    LAYOUTS,
    PLAIN_CLASS,
    POLICY,
    ParameterLayout,
    check_placed_alike,
    is_wrapped,
    know_own_forward,
)

_CASTS = "_simple_fsdp_casts"  # on a subclass whose forward casts, for instances with a policy


def use_subclass(module: nn.Module, names: Iterable[str]) -> None:
    """Make ``module`` an instance of its class's one subclass, with a descriptor per name. State
    lives on the instance: two models of one class may differ in mesh and policy, and one instance's
    parameter may be another's buffer or None."""
    cls = type(module)
    subclass = cls if hasattr(cls, PLAIN_CLASS) else _subclass(cls)  # type: ignore[arg-type]
    for name in names:
        if name not in vars(subclass):
            setattr(subclass, name, _Gathering(name))
    module.__class__ = subclass
    know_own_forward(module)
    living.note(module)
    recurrent.drop_second_list(module)


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls``, under the same name so that ``repr`` and errors read the same."""
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        LAYOUTS: {},  # as GATHERS, for instances that the model's own code makes by type(self)()
        GATHERS: {},
        **_methods(cls),
        **control.members(cls),
        **hints.members(cls),
        **refused.members(cls),
        **accessors(cls),
        **generation.members(cls),
        **init_flow.members(cls),
        **containers.members(cls),
    }
    if _has_forward(cls):
        members["forward"] = marked(cls)
    if issubclass(cls, nn.RNNBase):
        members |= recurrent.MEMBERS
    metaclass = equal_to_plain(type(cls))  # type: ignore[arg-type]
    subclass = metaclass(cls.__name__, (cls,), members)
    # Not before: with this the subclass equals ``cls``; a registry of classes must see a new class.
    setattr(subclass, PLAIN_CLASS, cls)
    return cast(type[nn.Module], subclass)


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """Overridden methods for the subclass of ``cls``: torch sets, saves and copies by them."""

    def _load_from_state_dict(self: nn.Module, *args: Any) -> None:
        with sums_stay(self), kept.kept_stays(self):
            plain_values.load(self, cls._load_from_state_dict, *args)

    def _save_to_state_dict(self: nn.Module, *args: Any) -> None:
        refuse_assigned_since(param for param in self._parameters.values() if param is not None)
        with_gradients = torch.is_grad_enabled()
        # In inference mode no DTensor can be detached. Its end turns gradients on.
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
            cls._save_to_state_dict(self, *args)
            kept.share_versions(self, *args[:2])

    def _apply(self: nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept.free_everywhere(self)  # for parameters may get another dtype, or lose their values
        with sums_stay(self, emptied=is_to_empty(fn)):
            return uninitialised.apply_marking(self, cls._apply, fn, *args, **kwargs)

    def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
        cls.__setstate__(self, state)
        living.note(self)  # a copy
        forget_seen(self)
        loaded.remember(self)
        kept.forget(self)
        begin_anew(self)

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        param = init_flow.sharded_original(param, self._parameters.get(name))
        check_placed_alike(self, name, param)
        kept.free([self])  # such as by load_state_dict(assign=True)
        carry_over(self, name, param)
        layout = getattr(self, LAYOUTS).get(name)
        if layout is not None and isinstance(param, DTensor):
            note_replaced(self, name, param, layout.spec.fqn)
        cls.register_parameter(self, name, param)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        # Libraries that fuse the last layer and the loss set a forward.
        cls.__setattr__(self, name, forwards.set_on(self, value) if name == "forward" else value)

    methods = (_save_to_state_dict, _load_from_state_dict, _apply, __setstate__, register_parameter)
    return {method.__name__: method for method in (*methods, __setattr__)}


def _has_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward


def computes_with_parts(module: nn.Module) -> bool:
    """Whether a forward of ``module`` may read parameters of the modules inside it."""
    cls = type(module)
    only_calls_them = cls.forward is nn.Sequential.forward
    has_forward = _has_forward(cls) or "forward" in module.__dict__
    return has_forward and not only_calls_them and next(module.children(), None) is not None


def cast_in_forward(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Have ``model``, a wrapped root, cast its inputs and outputs as ``policy`` says.

    With nothing to cast, its forward is ours nevertheless: Dynamo does not start at a forward of
    torch's own, so ``nn.Sequential(...).compile()`` would compile each layer apart.
    """
    model.__dict__[POLICY] = policy
    use_subclass(model, ())
    cls = type(model)
    if _CASTS not in vars(cls):
        there: Any = vars(cls).get("forward")
        is_users = there is not None and not is_marked(there)  # set on type(module), after a wrap
        forward_of = plain_method(getattr(cls, PLAIN_CLASS), "forward")
        casting = forwards.casting((lambda: there) if is_users else forward_of, cls.__qualname__)
        cls.forward = casting  # type: ignore[method-assign]
        setattr(cls, _CASTS, True)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let the method ``name`` of a wrapped module compute with gathered parameters, as forward.

    For a model that is also called by another name: ``model.encode_text(x)``. As FSDP2's
    ``register_fsdp_forward_method``. Methods that call ``self(...)``, such as ``generate``, or only
    submodules, need it not. On a module that was wrapped itself, its inputs and outputs are cast as
    those of its forward.

    Args:
        module: wrapped by :func:`simplefsdp.simple_fsdp`, itself or as a part of a model.
        name: of a method that computes.

    Raises:
        ValueError: ``module`` is not wrapped, or has no such method.
    """
    if not is_wrapped(module):
        raise ValueError(
            f"module: expected a module wrapped by simple_fsdp, got {type(module).__name__}"
        )
    cls = type(module)
    if not callable(getattr(cls, name, None)):
        raise ValueError(f"name: {cls.__name__} has no method {name!r}")
    method = forwards.casting(plain_method(cls, name), f"{cls.__qualname__}.{name}")
    module.__dict__[name] = MethodType(method, module)


class _Gathering:
    """The descriptor that a wrapped class has under the name of a parameter.

    It has no ``__set__``. So on an instance without the parameter, a plain attribute of that name,
    in ``__dict__``, goes before it. (A property would have to read it there; Dynamo of 2.11 takes
    ``__dict__[name]`` for the attribute, and recurses.)
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if module is None:
            return self
        param = module._parameters.get(self.name)
        if torch.compiler.is_compiling():
            if not in_traced_forward():
                return _plain_attribute(module, self.name)
            # `is_meta` would be a node of the graph.
            if param is not None and param.device.type == "meta":
                _break_the_graph()
            # A short way for most reads: Dynamo traces each step of it at each read.
            fields = getattr(module, GATHERS).get(self.name)
            if (
                fields is not None
                and not (torch.is_grad_enabled() and getattr(module, DEFERRALS))
                and not getattr(module, KEPT)
                and isinstance(param, DTensor)
            ):
                return gather(param, "", fields)
        return _read(module, self.name, param)


run_as_it_is(_Gathering.__get__)


def _read(module: nn.Module, name: str, param: Tensor | None) -> Any:
    layout = getattr(module, LAYOUTS).get(name)
    if layout is None or param is None:
        return _plain_attribute(module, name)
    if not isinstance(param, (DTensor, nn.Parameter)):
        return param  # that torch.func.functional_call has put there for a while
    if torch.compiler.is_compiling():
        # Here, too, without the FQN, by which layers that are alike would differ.
        return _gathered(param, layout, _now(module, name), fqn="")
    return _read_eagerly(module, name, param, layout)


run_as_it_is(_read)


@torch.compiler.disable(reason=f"a parameter {ON_META}")
def _break_the_graph() -> None:
    """Called where a parameter without values is traced: behind the break it is read again eagerly,
    and that error is short. An error from inside a trace ends in hundreds of lines of Dynamo's, and
    Dynamo never compiles that code again."""


def _now(module: nn.Module, name: str) -> dict[str, Any]:
    """What the gather of a parameter that is read now is told beside its spec."""
    full = kept.kept_of(module, name)
    return deferral_of(module, name) | ({} if full is None else {"kept": full})


def _read_eagerly(module: nn.Module, name: str, param: Tensor, layout: ParameterLayout) -> Tensor:
    if init_flow.initialising() and isinstance(param, DTensor):
        return init_flow.full_parameter(param)
    if not in_forward():
        return param
    if param.is_meta:
        torch.compiler.reset()  # compiled code would go on to break here; gather raises
    fqn, now = layout.spec.fqn, _now(module, name)
    if isinstance(param, DTensor):
        refuse_assigned([(fqn, param)])
        if "kept" in now:
            kept.refresh([param])
        else:
            taken = functools.partial(loaded.taken, module, name)
            note_gather(param.device_mesh, fqn, layout.spec.shard_group, taken)
    if torch.is_inference_mode_enabled():
        # A tensor made in that mode does not tell that it was written to.
        with torch.inference_mode(False), torch.no_grad():
            full = _gathered(param, layout, now, fqn)
    else:
        full = _gathered(param, layout, now, fqn)
        note_backward(full, param, now.get("until", "all"))
    looks_plain = layout.tensor_parallel is None and not layout.spec.tensor_class
    values = local_part(param) if layout.spec.tensor_class else full
    uninitialised.refuse(uninitialised.without_values([(fqn, param, values)]))
    return read_only(full, fqn) if looks_plain else full


def _gathered(param: Tensor, layout: ParameterLayout, now: dict[str, Any], fqn: str) -> Tensor:
    if not isinstance(param, DTensor):
        raise TypeError(
            f"{layout.spec.fqn}: expected the sharded DTensor, got {type(param).__name__}; after "
            "simple_fsdp a parameter must not be replaced: load values into it with load_state_dict"
        )
    full = gather(param, fqn, layout.fields, **now)
    return full if layout.tensor_parallel is None else layout.tensor_parallel.rewrap(full)


def _plain_attribute(module: nn.Module, name: str) -> Any:
    """What ``module.name`` is on an instance where ``name`` is not a sharded parameter."""
    if name in module._parameters:
        return module._parameters[name]
    if name in module._buffers:
        return module._buffers[name]
    return nn.Module.__getattr__(module, name)
