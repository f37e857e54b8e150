"""Changes that traced code has made to existing objects, and the objects that a layer can reach.

Dynamo does not carry out changes until the graph runs, so guards, which are checked against the
real objects, do not see them. A change is harmless for layers that are taken to be alike if it is
the same for all of them, and if no layer holds a reference to the changed object. An example is the
global that transformers sets before the first layer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import is_from_local_source
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting


@dataclass(frozen=True)
class Change:
    """An attribute that traced code has set. ``owner`` and Dynamo's ``value`` are kept so that
    their ids stay theirs. ``what`` is the change as text, which is compared: -0.0 is not 0.0 in it,
    and one empty list is not another."""

    owner: Any = field(compare=False)
    value: Any = field(compare=False)
    what: str


_MOST = 100_000  # objects that held_by() looks at
_NO_HOLDERS = torch.dtype, torch.device, str, int, float
_ENDS = (type, ModuleType, CodeType, BuiltinFunctionType, *_NO_HOLDERS)


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
        kind = type(one)
        if id(one) in found or issubclass(kind, _ENDS):
            continue
        if kind in weakref.ProxyTypes:
            raise LookupError(f"what a {kind.__name__} holds is not known")
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
    same_globals = _globals_of(state.held) == _globals_of(held)
    return not differs and same_globals and _correspond(state, given, held)


def _correspond(state: State, given: Sequence[object], held: Mapping[int, object]) -> bool:
    """Whether the objects that two layers hold correspond one to one, place by place, and no object
    that differs between them can be reached from both. Otherwise code may find out which layer it
    is in, as by ``self is self.config.layers[-1]``: Dynamo guards types, not identity."""
    if len(state.given) != len(given):
        return False
    counterpart: dict[int, object] = {}
    came_from: dict[int, object] = {}
    left = [*zip(state.given, given, strict=True)]
    while left:
        one, other = left.pop()
        if one is other or _is_end(one) or _is_end(other):
            continue
        if id(one) in counterpart or id(other) in came_from:
            if counterpart.get(id(one)) is not other or came_from.get(id(other)) is not one:
                return False
            continue
        if id(one) in held or id(other) in state.held:
            return False
        counterpart[id(one)], came_from[id(other)] = other, one
        # One may hold more: Dynamo leaves marks on tensors. What a trace reads of it is guarded.
        left += zip(_of(one), _of(other), strict=False)
    return True


def _is_end(one: object) -> bool:
    return one is None or issubclass(type(one), _ENDS)


def bases(source: Any) -> Iterator[Any]:
    """A source, then its base, then the base of that, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
