"""The wrapped modules that are alive, copies included, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import cast
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.wrapped import IGNORED, LAYOUTS, ignored_params, shards_of

_NAMES = "_simple_fsdp_names"  # on the outermost module that was wrapped: its parameters' FQNs
_FQN = "_simple_fsdp_fqn"  # of a parameter, once it was asked for
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # a module may have no hash


def note(module: nn.Module) -> None:
    """Note a module that owns shards, or that is an outermost one."""
    _modules[id(module)] = module


def modules() -> list[nn.Module]:
    """All that were noted and are alive."""
    return list(_modules.values())


def remember_fqns(model: nn.Module) -> None:
    """Note the names of all parameters of ``model``, the outermost wrap so far."""
    fqns: set[str] = set()
    for module in model.modules():
        module.__dict__.pop(_NAMES, None)
        for _, param in shards_of(module):
            param.__dict__.pop(_FQN, None)
        fqns.update(layout.spec.fqn for layout in module.__dict__.get(LAYOUTS, {}).values())
    model.__dict__[_NAMES] = frozenset(fqns)


def known_fqns(fqns: Collection[str]) -> list[str]:
    """Parameters of the living models that have all of ``fqns``, which a graph reads, for patterns
    may name what it does not read. If no model has all, several wraps are in one graph: then of
    those that have one of them."""
    found = [module.__dict__.get(_NAMES) for module in modules()]
    models = [cast(frozenset[str], names) for names in found if names is not None]
    wanted = set(fqns)
    own = [names for names in models if wanted <= names]
    return sorted(set().union(*(own or [names for names in models if wanted & names])))


def living_shards() -> Iterator[tuple[str, DTensor]]:
    """Every sharded parameter of every living module, with its FQN."""
    for module in modules():
        layouts = module.__dict__.get(LAYOUTS, {})
        for name, param in shards_of(module):
            yield (layouts[name].spec.fqn if name in layouts else name), param


def fqn_of(param: object) -> str | None:
    """The FQN of a sharded parameter of a living module; None of anything else."""
    if not isinstance(param, DTensor):
        return None
    if _FQN not in param.__dict__:
        for fqn, other in living_shards():
            other.__dict__.setdefault(_FQN, fqn)
    return param.__dict__.get(_FQN)


def ignored() -> set[int]:
    """The ``id`` of each parameter of a living model that the user wants left alone."""
    return ignored_params(m for m in modules() if IGNORED in m.__dict__)


def models_of(params: Iterable[object]) -> Iterator[nn.Module]:
    """The living outermost models that own any of ``params``."""
    wanted = {id(param) for param in params}
    for module in modules():
        if _NAMES in module.__dict__ and any(id(p) in wanted for p in module.parameters()):
            yield module
