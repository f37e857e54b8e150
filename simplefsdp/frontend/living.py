"""The wrapped modules that are alive, copies included, and the names of their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.wrapped import IGNORED, fqn_of, ignored_params, layouts_of, shards_of

# On a parameter: how many wraps there were when its FQN was looked for; its id, since a copy of it
# has the same attributes; and the FQN. No weak references: torch swaps no tensor that has one.
_FQN = "_simple_fsdp_fqn"
_NAMES = "_simple_fsdp_names"  # on the outermost module that was wrapped: its parameters' FQNs
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # a module may have no hash


class _Wraps:
    count = 0  # so far


def note(module: nn.Module) -> None:
    """Note a module that owns shards, or that is an outermost one."""
    _modules[id(module)] = module


def modules() -> list[nn.Module]:
    """All that were noted and are alive."""
    return list(_modules.values())


def remember_fqns(model: nn.Module) -> None:
    """Note the names of all parameters of ``model``, the outermost wrap so far."""
    _Wraps.count += 1
    fqns: set[str] = set()
    for module in model.modules():
        module.__dict__.pop(_NAMES, None)
        fqns.update(layout.spec.fqn for layout in layouts_of(module).values())
    model.__dict__[_NAMES] = frozenset(fqns)


def known_fqns(fqns: Collection[str]) -> list[str]:
    """All parameters of the living models that have all of ``fqns``, which are those that a graph
    reads: patterns may also name others. If no model has all, several wraps are in one graph: then
    all parameters of the models that have any of them."""
    models: list[frozenset[str]] = [m.__dict__[_NAMES] for m in modules() if _NAMES in m.__dict__]
    wanted = set(fqns)
    own = [names for names in models if wanted <= names]
    return sorted(set().union(*(own or [names for names in models if wanted & names])))


def living_shards() -> Iterator[tuple[str, DTensor]]:
    """Every sharded parameter of every living module, with its FQN."""
    for module in modules():
        for name, param in shards_of(module):
            yield fqn_of(module, name), param


def owners() -> dict[int, tuple[nn.Module, str]]:
    """The module of each sharded parameter of a living module, and its name there, by its ``id``.
    Of a tied one the last."""
    return {id(param): (module, name) for module in modules() for name, param in shards_of(module)}


_found: dict[int, tuple[weakref.ref[nn.Module], str]] = {}  # when owner_of() looked last


def owner_of(param: Tensor) -> tuple[nn.Module, str] | None:
    """The living module that has ``param`` as a sharded parameter, and its name there; None if none
    has. All modules are looked at only for one that was not there the last time."""
    ref, name = _found.get(id(param), (None, ""))
    module = None if ref is None else ref()
    if module is None or module._parameters.get(name) is not param:
        now = owners()
        _found.clear()
        _found.update((key, (weakref.ref(m), its)) for key, (m, its) in now.items())
        return now.get(id(param))
    return module, name


_alike: dict[object, tuple[weakref.ref[nn.Module], str]] = {}  # what fqn_alike() found, by layout


def fqn_alike(tensor: DTensor) -> str:
    """The FQN of a sharded parameter for which :func:`is_sharded_alike` is true; "" if there is
    none. All modules are looked at only where what was found for this layout is no longer so."""
    key = tensor.shape, hash(tensor.device_mesh), tensor.placements  # holds no mesh
    ref, name = _alike.get(key, (None, ""))
    module = None if ref is None else ref()
    param = None if module is None else module._parameters.get(name)
    if module is None or not isinstance(param, DTensor) or not is_sharded_alike(tensor, param):
        owned = ((m, n) for m in modules() for n, p in shards_of(m) if is_sharded_alike(tensor, p))
        module, name = next(owned, (None, ""))
        if module is None:
            return ""
        _alike[key] = weakref.ref(module), name
    return fqn_of(module, name)


def is_sharded_alike(tensor: DTensor, param: DTensor) -> bool:
    """Whether ``tensor`` may be the gradient of ``param``, its moments, or noise for it: it has the
    shape, the mesh and the placements of ``param``."""
    return (tensor.shape, tensor.device_mesh, tensor.placements) == (
        param.shape,
        param.device_mesh,
        param.placements,
    )


def fqns_of(named: Sequence[tuple[Tensor, str]]) -> list[str]:
    """The FQNs of parameters. Each parameter is given with a name for when it is of no living
    module, as in ``torch.func.functional_call``."""
    found = [_known_fqn(param) for param, _ in named]
    if None in found:
        for fqn, param in [*living_shards(), *(("", param) for param, _ in named)]:
            if _known_fqn(param) is None:
                setattr(param, _FQN, (_Wraps.count, id(param), fqn))
        found = [_known_fqn(param) for param, _ in named]
    return [fqn or name for fqn, (_, name) in zip(found, named, strict=True)]


def _known_fqn(param: Tensor) -> str | None:
    """A parameter's FQN, "" if it is of no module; None if not looked for since the last wrap."""
    count, own, fqn = param.__dict__.get(_FQN, (0, 0, None))
    return fqn if (count, own) == (_Wraps.count, id(param)) else None


def ignored() -> set[int]:
    """The ``id`` of each parameter of a living model that the user wants left alone."""
    return ignored_params(m for m in modules() if IGNORED in m.__dict__)


def models_of(params: Iterable[object]) -> Iterator[nn.Module]:
    """The living outermost models that own any of ``params``."""
    wanted = {id(param) for param in params}
    for module in modules():
        if _NAMES in module.__dict__ and any(id(p) in wanted for p in module.parameters()):
            yield module
