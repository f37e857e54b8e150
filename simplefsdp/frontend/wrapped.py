"""What a wrapped module carries, and how to recognise one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.frontend.placement import TensorParallel

LAYOUTS = "_simple_fsdp_layouts"  # on every wrapped module: parameter name -> ParameterLayout
# On every wrapped module: parameter name -> what its gather is told beside the parameter's FQN, for
# those whose gather is the full parameter. Dynamo reads this and not layouts: of a layout it would
# look at each field at each read, and FQNs in layouts would make layers differ that are alike.
GATHERS = "_simple_fsdp_gathers"
POLICY = "_simple_fsdp_policy"  # on the wrapped root: casts of its inputs and outputs
# On every wrapped module, what its gathers are told beside their specs, by parameter name. Both are
# always there: Dynamo does not look again for what a module's __dict__ lacked once.
DEFERRALS = "_simple_fsdp_deferrals"  # see accumulation.py
KEPT = "_simple_fsdp_kept"  # see kept.py
# On every wrapped module: the TensorParallel of a parameter of its model that tensor parallelism
# has split, or None. The model's other parameters have a copy on each rank of that mesh.
SPLIT_BESIDE = "_simple_fsdp_split_beside"
IGNORED = "_simple_fsdp_ignored"  # on a wrapped root: FQNs of parameters to be left alone
PLAIN_CLASS = "_simple_fsdp_plain_class"  # on every subclass: the class it was made from


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter of one module instance is gathered, and what it looks like."""

    spec: GatherSpec
    tensor_parallel: TensorParallel | None
    shape: torch.Size
    placements: tuple[Placement, ...]
    fields: str = field(init=False)  # the spec as text, but its FQN; kept, as to make it is slow

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", self.spec.arguments()[1])


def set_layouts(module: nn.Module, layouts: Mapping[str, ParameterLayout]) -> None:
    """Have the parameters of ``module`` gathered by their ``layouts``, and no others gathered."""
    gathers = {
        name: layout.fields for name, layout in layouts.items() if layout.tensor_parallel is None
    }
    module.__dict__ |= {LAYOUTS: dict(layouts), GATHERS: gathers}


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` was wrapped, itself or as a part of a wrapped model."""
    return LAYOUTS in module.__dict__


def wrapped_parts(model: nn.Module) -> list[nn.Module]:
    """``model`` and what is in it, as far as it is wrapped."""
    return [module for module in model.modules() if is_wrapped(module)]


def layouts_of(module: nn.Module) -> dict[str, ParameterLayout]:
    """How the own parameters of ``module`` are gathered, by name; empty if it is not wrapped."""
    return module.__dict__.get(LAYOUTS, {})


def wrapped_in(name: str, module: nn.Module) -> list[nn.Module]:
    """The wrapped modules among ``module`` and those in it. ValueError if there is none, with
    ``name`` as the name of that argument."""
    found = wrapped_parts(module) if isinstance(module, nn.Module) else []
    if not found:
        raise ValueError(
            f"{name}: expected a module wrapped by simple_fsdp, or one that holds such a module, "
            f"got {type(module).__name__}"
        )
    return found


def check_placed_alike(module: nn.Module, name: str, param: object) -> None:
    """Refuse a DTensor as the parameter ``name`` if its layout is not the one to gather it by."""
    layout = layouts_of(module).get(name)
    if layout is None or not isinstance(param, DTensor):
        return
    if param.shape != layout.shape or param.placements != layout.placements:
        raise ValueError(
            f"{layout.spec.fqn}: expected a DTensor of shape {tuple(layout.shape)} placed "
            f"{layout.placements}, as simple_fsdp made it, got one of shape {tuple(param.shape)} "
            f"placed {param.placements}; redistribute it, or load a plain tensor by "
            "load_state_dict(), and change shapes before simple_fsdp"
        )
    own = module._parameters.get(name)
    if isinstance(own, DTensor):
        check_own_rows(layout.spec.fqn, param, own)


def check_own_rows(what: str, value: DTensor, param: DTensor) -> None:
    """Refuse ``value`` for ``param``, or its optimizer's state, if it has the rows of another rank:
    a DTensor that was pickled remembers who wrote it, on how many ranks; and a mesh may have its
    ranks in another order."""
    mesh, own = value.device_mesh, param.device_mesh
    there, here = mesh.get_coordinate(), own.get_coordinate()
    # What is placed otherwise cannot be loaded, as torch says.
    if there is None or here is None or value.placements != param.placements:
        return
    places = zip(value.placements, there, here, strict=True)
    is_own = all(one == other for p, one, other in places if not isinstance(p, Replicate))
    if mesh.shape != own.shape or not is_own:
        raise ValueError(
            f"{what}: expected this rank's rows, or the full tensor, got what rank {tuple(there)} "
            f"of {tuple(mesh.shape)} had, on rank {tuple(here)} of {tuple(own.shape)}. torch.save("
            "state_dict()) on one rank writes what that rank alone has. If that is all (one rank, "
            "mode='replicate'), load tensor.to_local(); else save on all ranks, by "
            "torch.distributed.checkpoint, or full tensors (get_state_dict with "
            "StateDictOptions(full_state_dict=True))"
        )


def shards_of(module: nn.Module) -> list[tuple[str, DTensor]]:
    """The module's own sharded parameters, by name."""
    own = module._parameters.items()
    return [(name, cast(DTensor, param)) for name, param in own if isinstance(param, DTensor)]


def fqn_of(module: nn.Module, name: str) -> str:
    """The FQN of a module's own parameter; of one that came after the wrap its name."""
    layout = layouts_of(module).get(name)
    return name if layout is None else layout.spec.fqn


@contextmanager
def mark_stays(module: nn.Module, mark: str) -> Iterator[list[tuple[DTensor, Any]]]:
    """Around code that may swap the tensors of the own parameters of ``module``, and their
    ``__dict__`` with them: parameters that have ``mark`` keep it, unless others took their places.
    Yields a list of these parameters with their marks; at the end, it has only those that are still
    there."""
    stayed = [(p, p.__dict__[mark]) for _, p in shards_of(module) if mark in p.__dict__]
    yield stayed
    own = {id(param) for param in module._parameters.values()}
    stayed[:] = [(param, value) for param, value in stayed if id(param) in own]
    for param, value in stayed:
        param.__dict__[mark] = value


def ignored_params(models: Iterable[nn.Module]) -> set[int]:
    """The ``id`` of each parameter that the user wants left alone, in any part of ``models``. By
    name, not by a mark on it: a copy of the model has other parameters."""
    found: set[int] = set()
    for module in (module for model in models for module in model.modules()):
        for fqn in module.__dict__.get(IGNORED, ()):
            owner, _, name = fqn.rpartition(".")
            found.add(id(module.get_submodule(owner)._parameters.get(name)))
    return found


def know_own_forward(module: nn.Module) -> None:
    """Set again the forward that was set on ``module`` before it had our class: our class marks a
    forward when it is set."""
    if "forward" in module.__dict__:
        module.forward = module.__dict__["forward"]


@contextmanager
def plain_classes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give ``modules`` their own classes back: reading a parameter gives what is registered."""
    wrapped = [(m, type(m)) for m in modules if hasattr(type(m), PLAIN_CLASS)]
    for module, cls in wrapped:
        module.__class__ = getattr(cls, PLAIN_CLASS)
    try:
        yield
    finally:
        for module, cls in wrapped:
            module.__class__ = cls
            know_own_forward(module)  # that was set meanwhile
