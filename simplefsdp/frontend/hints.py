"""Methods of FSDP2's modules that tell its runtime how to be fast. Where the compiler decides that,
they do nothing: a script that calls them gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from simplefsdp.rank_logging import say

_ORDER = "the compiler orders collectives: bucketing='auto' chooses how far ahead each starts"
_BUFFERS = "there are no buffers of our own"
_HINTS = {
    "set_modules_to_forward_prefetch": _ORDER,
    "set_modules_to_backward_prefetch": _ORDER,
    "set_reduce_scatter_max_input_buffers": _ORDER,
    "set_unshard_in_backward": "backward gathers only the parameters that it reads",
    "set_allocate_memory_from_process_group_for_comm": _BUFFERS,
    "set_symm_mem_for_comm": _BUFFERS,
}


def set_post_optim_event(self: nn.Module, event: torch.Event) -> None:
    """Have the current stream, on which parameters are gathered, wait for ``event``, which was
    recorded after the optimizer's step."""
    event.wait()


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: these methods, less those that ``cls`` has of its own."""
    ours = {name: _nothing(name) for name in _HINTS} | {
        set_post_optim_event.__name__: set_post_optim_event
    }
    return {name: method for name, method in ours.items() if not hasattr(cls, name)}


def _nothing(name: str) -> Callable[..., None]:
    def hint(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        say("%s.%s does nothing: %s", type(self).__name__, name, _HINTS[name])

    hint.__name__ = name
    hint.__doc__ = f"Does nothing: {_HINTS[name]}."
    return hint
