"""Changes that traced code has made to existing objects, and the objects that a layer can reach.

Dynamo does not carry out changes until the graph runs, so guards, which are checked against the
real objects, do not see them. A change is harmless for layers that are taken to be alike if it is
the same for all of them, and if no layer holds a reference to the changed object. An example is the
global that transformers sets before the first layer.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import is_from_local_source
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

from simplefsdp._torch.exact import exactly


@dataclass(frozen=True)
class Change:
    """An attribute that traced code has set. ``owner`` and Dynamo's ``value`` are kept so that
    their ids stay theirs. ``what`` is the change as text, which is compared: -0.0 is not 0.0 in it,
    and one empty list is not another."""

    owner: Any = field(compare=False)
    value: Any = field(compare=False)
    what: str


_MOST = 100_000  # objects that held_by() looks at
_ENDS = (type, ModuleType, CodeType, BuiltinFunctionType, torch.dtype, torch.device)


def changes(tx: Any) -> tuple[Change, ...]:
    """The attributes of global objects that the traced code has set to constants. Raises a
    LookupError if it has changed any other object that existed before."""
    effects = tx.output.side_effects
    held = (item.mutation_type for item in effects.id_to_variable.values())
    if any(isinstance(kind, ValueMutationExisting) and kind.is_modified for kind in held):
        raise LookupError("something is changed between the layers, or in them")
    return tuple(
        _change(item, name, value)
        for item, stored in effects.store_attr_mutations.items()
        if isinstance(item.mutation_type, AttributeMutationExisting)
        for name, value in stored.items()
    )


def _change(item: Any, name: str, value: Any) -> Change:
    if not isinstance(item, UserDefinedObjectVariable) or is_from_local_source(item.source):
        raise LookupError(f"{name} is changed between the layers, or in them")
    constant = value.as_python_constant() if value.is_python_constant() else object()
    empty = isinstance(constant, (dict, list, tuple)) and not constant
    if not (empty or constant is None or type(constant) in (bool, int, float, str)):
        raise LookupError(f"{name} is changed to what layers may change")
    known = f"{type(constant)} {constant!r} {id(value) if empty else ''}"
    return Change(item.value, value, f"{id(item.value)}.{name}: {known}")


def held_by(roots: Iterable[object]) -> dict[int, object]:
    """All objects that can be reached from ``roots``, which are included, by id.

    The globals of functions are not followed: code that reads them reads them by a global name.
    Raises a LookupError if there are too many objects, or if one hides which objects it holds.
    """
    found: dict[int, object] = {}
    left = list(roots)
    for _ in range(_MOST):
        if not left:
            return found
        one = left.pop()
        if id(one) in found or _is_end(one):
            continue
        if type(one) in weakref.ProxyTypes:
            raise LookupError(f"what a {type(one).__name__} holds is not known")
        found[id(one)] = one
        left += _of(one)
    raise LookupError("a layer or what it reads holds too many objects")


def _of(one: object) -> list[object]:
    if isinstance(one, FunctionType):
        return [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
    if isinstance(one, torch.Tensor):
        return [one.__dict__]
    if isinstance(one, weakref.ref):
        return [one(), getattr(one, "__callback__", None)]
    return gc.get_referents(one)


def _globals_of(held: Mapping[int, object]) -> set[int]:
    """The ids of the ``__globals__`` of all functions among ``held``."""
    return {id(one.__globals__) for one in held.values() if isinstance(one, FunctionType)}


class State(NamedTuple):
    """What a layer's trace depends on that its own guards do not cover: the changes by the code
    before it; the layer and its arguments; all objects that these hold; and the objects that the
    globals hold which were read up to the end of the layer. Objects are keyed by id."""

    changed: tuple[Change, ...]
    given: list[object]
    held: dict[int, object]
    read: dict[int, object]


def hold_alike(state: State, given: Sequence[object], held: Mapping[int, object]) -> bool:
    """Whether two layers are alike in what they hold: the functions that they hold have the same
    globals, no object that only one layer holds is reachable from a global that was read, where a
    layer may find itself, and the objects correspond.

    Args:
        state: of the layer that was traced.
        given: the other layer and its arguments.
        held: all objects that these hold, by id.
    """
    differs = (state.held.keys() ^ held.keys()) & state.read.keys()
    same = _globals_of(state.held) == _globals_of(held) and len(state.given) == len(given)
    return not differs and same and _correspond(state, given, held)


def _correspond(state: State, given: Sequence[object], held: Mapping[int, object]) -> bool:
    """Whether the objects that two layers hold correspond one to one, place by place, in one order,
    and no object that differs between them can be reached from both. Otherwise code may find out
    which layer it is in, as by ``self is self.config.layers[-1]``: Dynamo guards types, not
    identity, and of attributes and hooks not the order."""
    shared = state.held.keys() & held.keys()
    counterpart: dict[int, object] = {}
    came_from: dict[int, object] = {}
    left = [*zip(state.given, given, strict=True)]
    while left:
        one, other = left.pop()
        if one is other:
            continue
        if id(one) in shared or id(other) in shared:
            return False
        if _is_end(one) or _is_end(other):
            continue
        is_new = id(one) not in counterpart
        ours, theirs = counterpart.setdefault(id(one), other), came_from.setdefault(id(other), one)
        if ours is not other or theirs is not one:
            return False
        pairs = _paired(one, other) if is_new else ()
        if pairs is None:
            return False
        left += pairs
    return True


def _paired(one: object, other: object) -> list[tuple[object, object]] | None:
    """What two objects hold in the same places; None if they hold it in another order, if one has
    an attribute that the other lacks, or if sets hold objects, which have no place. What only one
    dictionary or list holds is guarded where it is read, as by a guard of its length."""
    if isinstance(one, (set, frozenset)):
        return [] if isinstance(other, (set, frozenset)) and _in_one_order(one, other) else None
    ours, theirs = _named(one), _named(other)
    if ours is not one and theirs is not other and list(ours or ()) != list(theirs or ()):
        return None
    parts, others = _parts(one, ours, theirs), _parts(other, theirs, ours)
    order = [key for key in parts if key in others]
    if exactly(order) != exactly([key for key in others if key in parts]):
        return None
    return [(parts[key], others[key]) for key in order]


def _in_one_order(one: Set[object], other: Set[object]) -> bool:
    """Whether going through two sets gives the same, one after the other; or they hold different
    constants, which guards compare."""
    if all(map(_is_end, one)) and all(map(_is_end, other)):
        return one != other or exactly(list(one)) == exactly(list(other))
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _named(one: object) -> dict[Any, object] | None:
    """The attributes of an object, or a dictionary itself; None if it is held otherwise."""
    if isinstance(one, torch.Tensor | FunctionType | weakref.ref):
        return None
    named = one if isinstance(one, dict) else getattr(one, "__dict__", None)
    return named if isinstance(named, dict) else None


def _parts(
    one: object, named: dict[Any, object] | None, elsewhere: dict[Any, object] | None
) -> dict[object, object]:
    """What ``one`` holds, in order, by a key that is the same for its counterpart: the name of an
    attribute or a key of a dictionary, if the counterpart has it, too; else a place. Each hook, for
    example, has a key of its own."""
    if named is None:
        return dict(enumerate(_of(one)))
    known = {id(named), *map(id, named.values()), *map(id, named)}
    rest = (part for part in _of(one) if id(part) not in known and not _is_end(part))
    found: dict[object, object] = dict(enumerate(rest))
    for i, (key, value) in enumerate(named.items()):
        is_in_both = _is_end(key) and key in (elsewhere or ())
        found["key" if is_in_both else "place", key if is_in_both else i] = value
    return found


def _is_end(one: object) -> bool:
    """Whether an object holds no others that count; classes and modules are read as globals are."""
    return type(one) in (NoneType, bool, int, float, str) or issubclass(type(one), _ENDS)


def bases(source: Any) -> Iterator[Any]:
    """A source, then its base, then the base of that, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
