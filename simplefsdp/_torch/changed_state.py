"""What traced code has changed that was there before, and what a layer holds and so can see.

Dynamo keeps changes to itself until the graph runs, so guards, which are asked of what is there,
do not see them. A change is harmless to layers that are taken to be alike if it is the same for
all of them and if none of them has the changed object by a name of its own. So it is with the
global that transformers sets before the first layer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import is_from_local_source
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting


@dataclass(frozen=True)
class Change:
    """An attribute that was set: whose, kept so that its id is no other's; Dynamo's value,
    likewise; and all of it as text, in which -0.0 is not 0.0, and no empty list is another."""

    owner: Any = field(compare=False)
    value: Any = field(compare=False)
    what: str


_MOST = 100_000  # objects that are looked at
_NO_HOLDERS = torch.dtype, torch.device, str, int, float
_ENDS = (type, ModuleType, CodeType, BuiltinFunctionType, *_NO_HOLDERS)


def changes(tx: Any) -> tuple[Change, ...]:
    """Attributes of global objects that the traced code has set to constants; a LookupError if it
    has changed something else that was there before."""
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
    """All objects that some hold, themselves included, by id.

    What functions find among their globals is left out: who reads that reads it by a global's name.
    A LookupError if there are too many, or one hides what it holds.
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
    """The ids of the globals of those functions that are among ``held``."""
    return {id(one.__globals__) for one in held.values() if isinstance(one, FunctionType)}


class State(NamedTuple):
    """What a layer found that no guard of its own tells: what the code before it had changed; what
    it and its arguments hold, and what globals hold that were read until its end, by id."""

    changed: tuple[Change, ...]
    held: dict[int, object]
    read: dict[int, object]


def hold_alike(state: State, held: Mapping[int, object]) -> bool:
    """Whether nothing that only one of two layers holds is in a global that was read, where a layer
    may find itself, and their functions have the same globals."""
    differs = (state.held.keys() ^ held.keys()) & state.read.keys()
    return not differs and _globals_of(state.held) == _globals_of(held)


def bases(source: Any) -> Iterator[Any]:
    """A source, and what it is of."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
