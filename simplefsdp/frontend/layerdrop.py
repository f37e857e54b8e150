"""transformers' models that drop layers at random (LayerDrop), where ranks share a model.

Each rank draws for itself which layers it drops, and ranks that drop different layers would wait
for each other in gathers. Most such models call ``is_fsdp_managed_module``, and under FSDP2 drop
none. That function looks for a mark of FSDP2's, which our modules do not have, since Dynamo would
guard less of them. So it is replaced by one that asks here first.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from simplefsdp.rank_logging import say, speaks

log = logging.getLogger("simplefsdp")
_QUESTION = "is_fsdp_managed_module"
_KEEPS = "_simple_fsdp_keeps_layers"  # on a wrapped module that asks


def keep_layers(modules: Iterable[nn.Module]) -> None:
    """For the modules of a model that is being wrapped: have those that call
    ``is_fsdp_managed_module`` drop no layers; warn of a model that drops layers and does not call
    it."""
    asking, dropping = False, ""
    for module in modules:
        asked = [names for cls in type(module).__mro__ for names in _asked_by(cls)]
        for names in asked:
            module.__dict__[_KEEPS] = asking = True
            names[_QUESTION] = _asking_here_first(names[_QUESTION])
        config = getattr(module.__dict__.get("config"), "__dict__", {})
        rates = [f"{name} {rate}" for name, rate in config.items() if "layerdrop" in name and rate]
        dropping = dropping or ", ".join(rates)
    if dropping and asking:
        say("%s: no layer of a sharded model is dropped, as under FSDP2", dropping)
    elif dropping and speaks():
        log.warning(
            "%s: ranks that drop other layers would wait for each other, or mix them up; set it to "
            "0, or seed ranks alike",
            dropping,
        )


def _asked_by(cls: type) -> list[dict[str, Any]]:
    """The globals of a class's own forward, in a list; empty if that does not ask transformers."""
    function = inspect.unwrap(forward) if callable(forward := vars(cls).get("forward")) else None
    if _QUESTION not in getattr(getattr(function, "__code__", None), "co_names", ()):
        return []
    names: dict[str, Any] = function.__globals__  # type: ignore[union-attr]
    module = getattr(names.get(_QUESTION), "__module__", None)
    return [names] if str(module).startswith("transformers.") else []


def _asking_here_first(asked: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    if hasattr(asked, "asks_here_first"):
        return asked

    @functools.wraps(asked)
    def is_fsdp_managed_module(module: nn.Module) -> bool:
        return getattr(module, _KEEPS, False) or asked(module)

    is_fsdp_managed_module.asks_here_first = True  # type: ignore[attr-defined]
    return is_fsdp_managed_module
