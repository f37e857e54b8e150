"""Objects that are registered with accelerate for checkpointing, such as an average of a model.

accelerate pickles the state of such an object on the main process, and each rank loads all of it.
So shards in the state are saved as full tensors, from the main process's CPU, and are sharded again
on loading.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.full_parameters import full_of
from simplefsdp.frontend.placement import distribute


class Saved:
    """Stands for a registered object while it is saved. Constructing it is collective.

    Args:
        registered: the object.
        keep: whether this rank writes the state; other ranks only take part in gathering it.

    Raises:
        ValueError: the state holds shards in something else than dicts, lists and tuples.
    """

    def __init__(self, registered: Any, *, keep: bool) -> None:
        def full(value: Tensor, _: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            whole = full_of(value).detach()
            return whole.cpu() if keep else None

        self._state = _converted(registered.state_dict(), None, full)
        if _has_shards(self._state):
            raise ValueError(
                f"register_for_checkpointing: the state of {type(registered).__name__} holds "
                "shards in something else than dicts, lists and tuples; return one of these from "
                "its state_dict()"
            )

    def state_dict(self) -> Any:
        """The state, with full tensors for shards."""
        return self._state


class Loaded:
    """Stands for a registered object while it is loaded, which is collective."""

    def __init__(self, registered: Any) -> None:
        self._registered = registered

    def load_state_dict(self, state: Any) -> None:
        """Load a full state; tensors for which the object has shards now are sharded likewise."""

        def own_part(value: Tensor, now: Any) -> Tensor:
            if isinstance(value, DTensor):
                raise ValueError(
                    f"load_state: of the registered {type(self._registered).__name__} this "
                    "checkpoint has rank 0's rows alone, as accelerate saves them by itself; load "
                    "without registering it, and begin it anew"
                )
            if not isinstance(now, DTensor) or value.shape != now.shape:
                return value
            return distribute(value.to(now.device), now.device_mesh, now.placements)

        now = self._registered.state_dict()
        self._registered.load_state_dict(_converted(state, now, own_part))


def _converted(state: Any, other: Any, convert: Callable[[Tensor, Any], Any]) -> Any:
    """``state``, of dicts, lists and tuples, with its tensors converted. ``convert`` is called with
    a tensor, and with the value at the same place in ``other``, or None."""

    def item(key: Any) -> Any:
        try:
            counterpart = other[key]
        except (KeyError, IndexError, TypeError):
            counterpart = None
        return _converted(state[key], counterpart, convert)

    if isinstance(state, Tensor):
        return convert(state, other)
    if isinstance(state, Mapping):
        new: Any = copy.copy(state)
        for key in state:
            new[key] = item(key)
        return new
    if isinstance(state, list):
        new = copy.copy(state)
        new[:] = map(item, range(len(state)))
        return new
    if type(state) is tuple or hasattr(state, "_make"):
        items = map(item, range(len(state)))
        return state._make(items) if hasattr(state, "_make") else tuple(items)
    return state


def _has_shards(state: Any) -> bool:
    """Whether pickling ``state`` would come upon a DTensor."""
    found = False

    class Probe(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            nonlocal found
            found = found or isinstance(value, DTensor)
            return "tensor" if isinstance(value, Tensor) else None

    try:
        Probe(BytesIO()).dump(state)
    except Exception:  # accelerate will report that the state cannot be pickled
        return found
    return found
