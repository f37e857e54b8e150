"""Names of the parameters of living models: patterns may name what a graph does not read."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakSet

from torch import nn

from simplefsdp.wrapped import LAYOUTS

_MARK = "_simple_fsdp_names"  # on the outermost module that was wrapped


class _Names:
    """FQNs of a model's parameters, that live as long as it, and are copied with it."""

    def __init__(self, fqns: frozenset[str]) -> None:
        self.fqns = fqns
        _living.add(self)

    def __deepcopy__(self, memo: object) -> _Names:
        return _Names(self.fqns)


_living: WeakSet[_Names] = WeakSet()


def remember_fqns(model: nn.Module) -> None:
    """Note the names of all parameters of ``model``, the outermost wrap so far."""
    fqns: set[str] = set()
    for module in model.modules():
        module.__dict__.pop(_MARK, None)
        fqns.update(layout.spec.fqn for layout in module.__dict__.get(LAYOUTS, {}).values())
    model.__dict__[_MARK] = _Names(frozenset(fqns))


def known_fqns(fqns: Collection[str]) -> list[str]:
    """Parameters of the living models that have all of ``fqns``, which a graph reads.

    If there is none, several wraps are in one graph: of those that have one of them.
    """
    models = [names.fqns for names in _living]
    wanted = set(fqns)
    own = [found for found in models if wanted <= found]
    return sorted(set().union(*(own or [found for found in models if wanted & found])))
