"""What traced code has changed that was there before, and whether a layer can see it.

Dynamo keeps changes to itself until the graph runs, so guards, which are asked of what is there,
do not see them. A change is harmless to layers that are taken to be alike if it is the same for
all of them and if none of them has the changed object by a name of its own. So it is with the
global that transformers sets before the first layer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._dynamo.source import is_from_local_source
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting


@dataclass(frozen=True)
class Change:
    """An attribute that was set.

    Attributes:
        owner: whose; it is kept, so that its id is no other's.
        what: whose, which, and to what; -0.0 is not 0.0.
    """

    owner: Any = field(compare=False)
    what: str


_MOST = 50_000  # objects that are looked at
_ENDS = (
    type,
    ModuleType,
    CodeType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    str,
    int,
    float,
)


def changes(tx: Any) -> tuple[Change, ...]:
    """Attributes of global objects that the traced code has set to constants.

    Raises:
        LookupError: it has changed something else that was there before.
    """
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
    return Change(item.value, f"{id(item.value)}.{name}: {type(constant)} {constant!r}")


def can_be_seen(changed: Iterable[Change], roots: Iterable[object]) -> bool:
    """Whether one of ``roots``, a layer or its arguments, holds an object that has changed.

    What functions find among their globals has the same name for all layers, and is not looked at.
    """
    wanted = {id(change.owner) for change in changed}
    seen: set[int] = set()
    left = list(roots) if wanted else []
    while left:
        found = left.pop()
        if id(found) in wanted or len(seen) > _MOST:
            return True
        if id(found) in seen or isinstance(found, _ENDS):
            continue
        seen.add(id(found))
        left += _held_by(found)
    return False


def _held_by(found: object) -> list[object]:
    if isinstance(found, FunctionType):
        return [found.__closure__, found.__defaults__, found.__kwdefaults__, found.__dict__]
    if isinstance(found, torch.Tensor):
        return [found.__dict__]
    return gc.get_referents(found)
