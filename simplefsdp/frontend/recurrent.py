"""torch's recurrent modules compute with a list of their parameters, kept beside them.

That list would go on holding the full, untrained tensors. On a wrapped module it is read anew from
the parameters each time, so that it holds the gathered ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def _read(self: nn.RNNBase) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: nn.RNNBase, *_: Any) -> None:
    """There is no second list to keep, and shards cannot lie in one chunk of cuDNN's memory."""


MEMBERS: dict[str, Any] = {
    "_flat_weights": property(_read, _ignore),
    "_init_flat_weights": _ignore,
    "_update_flat_weights": _ignore,
    "flatten_parameters": _ignore,
}


def drop_second_list(module: nn.Module) -> None:
    """Take the list, and the weak references to what is in it, from a module just wrapped."""
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
        module._flat_weight_refs = []


@contextmanager
def second_lists(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, those of ``modules`` that are of torch's recurrent classes have the list that these
    classes need. Its tensors are not in one chunk of memory, as torch has them for cuDNN, which
    also computes without."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        weights = module.__dict__["_flat_weights"] = _read(module)
        module._flat_weight_refs = [w if w is None else weakref.ref(w) for w in weights]
    try:
        yield
    finally:
        for module in recurrent:
            drop_second_list(module)
