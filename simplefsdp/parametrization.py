"""The parametrization: on a wrapped module, reading a parameter gathers it.

Each module that owns parameters becomes an instance of a subclass of its own class, in which every
parameter name is a property. There is one subclass per original class, whatever the number of
instances (Dynamo would recompile for each class); what differs between instances lives on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp._torch import cast_floating_point, run_as_it_is
from simplefsdp.gather import GatherSpec, gather
from simplefsdp.placement import TensorParallel

LAYOUTS = "_simple_fsdp_layouts"  # on every wrapped module: parameter name -> Layout
POLICY = "_simple_fsdp_policy"  # on the wrapped root: casts of its inputs and outputs
_PLAIN_CLASS = "_simple_fsdp_plain_class"  # on every subclass: the class it was made from


@dataclass(frozen=True)
class Layout:
    """How one parameter of one module instance is gathered."""

    spec: GatherSpec
    tensor_parallel: TensorParallel | None


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` was wrapped, itself or as a part of a wrapped model."""
    return LAYOUTS in module.__dict__


@contextmanager
def raw_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Reading a parameter of ``modules`` gives the DTensor itself, with no communication."""
    wrapped = [(m, type(m)) for m in modules if hasattr(type(m), _PLAIN_CLASS)]
    for module, cls in wrapped:
        module.__class__ = getattr(cls, _PLAIN_CLASS)
    try:
        yield
    finally:
        for module, cls in wrapped:
            module.__class__ = cls


def use_subclass(module: nn.Module, names: Iterable[str]) -> None:
    """Make ``module`` an instance of its class's one subclass, with a property per name.

    State lives on the instance: two models of one class may differ in mesh and policy, and one
    instance's parameter may be another's buffer or None.
    """
    cls = type(module)
    subclass = cls if hasattr(cls, _PLAIN_CLASS) else _subclass(cls)  # type: ignore[arg-type]
    for name in names:
        if name not in vars(subclass):
            setattr(subclass, name, _gathering_property(name))
    module.__class__ = subclass


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls``, under the same name so that ``repr`` and errors read the same."""

    def __repr__(self: nn.Module) -> str:
        with raw_parameters(self.modules()):
            return repr(self)

    def get_parameter(self: nn.Module, target: str) -> nn.Parameter:
        owner = self.get_submodule(target.rpartition(".")[0])
        with raw_parameters([self, owner]):
            return self.get_parameter(target)

    def _load_from_state_dict(
        self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        _shard_plain_values(self, state_dict, prefix)
        cls._load_from_state_dict(self, state_dict, prefix, *args)

    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _PLAIN_CLASS: cls,
        LAYOUTS: {},  # for instances that the model's own code makes of type(self)
        "__repr__": __repr__,
        "get_parameter": get_parameter,
        "_load_from_state_dict": _load_from_state_dict,
    }
    metaclass: Any = type(cls)
    return cast(type[nn.Module], metaclass(cls.__name__, (cls,), members))


def cast_in_forward(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Have ``model``, a wrapped root, cast its inputs and outputs as ``policy`` says.

    With nothing to cast, its forward is ours nevertheless: Dynamo does not start at a forward of
    torch's own, so ``nn.Sequential(...).compile()`` would compile each read of a parameter apart.
    """
    model.__dict__[POLICY] = policy
    use_subclass(model, ())
    cls = type(model)
    if "forward" not in vars(cls):
        cls.forward = _casting_forward(cls.forward)  # type: ignore[method-assign]


def _gathering_property(name: str) -> property:
    def get(self: nn.Module) -> Any:
        layout = getattr(self, LAYOUTS).get(name)
        if layout is None:
            return _plain_attribute(self, name)
        param = self._parameters[name]
        if not isinstance(param, DTensor):
            raise TypeError(
                f"{layout.spec.fqn}: expected the sharded DTensor, got {type(param).__name__}; "
                "after simple_fsdp a parameter must not be replaced: load values into it with "
                "load_state_dict"
            )
        if param.device.type == "meta":
            raise ValueError(
                f"{layout.spec.fqn}: is on the meta device, without values; call "
                "simplefsdp.init_weights(model) after simple_fsdp, or load a checkpoint"
            )
        full = gather(param, *layout.spec)
        tp = layout.tensor_parallel
        return full if tp is None else tp.rewrap(full)

    run_as_it_is(get)

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(get, put, delete)


def _plain_attribute(module: nn.Module, name: str) -> Any:
    """What ``module.name`` is on an instance where ``name`` is not a sharded parameter."""
    # Registries first: Dynamo of 2.11 takes __dict__[name] for module.name, and recurses.
    if name in module._parameters:
        return module._parameters[name]
    if name in module._buffers:
        return module._buffers[name]
    if name in module.__dict__:
        return module.__dict__[name]
    return nn.Module.__getattr__(module, name)


def _casting_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast_and_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        policy = self.__dict__.get(POLICY)
        if policy is None:  # an inner instance of the root's class
            return forward(self, *args, **kwargs)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating_point((args, kwargs), policy.param_dtype)
        output = forward(self, *args, **kwargs)
        if policy.output_dtype is not None:
            output = cast_floating_point(output, policy.output_dtype)
        return output

    return cast_and_forward


def _shard_plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Let ``load_state_dict`` take a plain model's tensors: each rank keeps its own slice."""
    for name in module.__dict__.get(LAYOUTS, ()):
        value, param = state_dict.get(prefix + name), module._parameters[name]
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_plain and isinstance(param, DTensor) and value.shape == param.shape:
            state_dict[prefix + name] = distribute_tensor(
                value.detach(), param.device_mesh, param.placements, src_data_rank=None
            )
