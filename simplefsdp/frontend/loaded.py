"""What ``load_state_dict`` gave parameters on this rank, for the ranks to compare.

Each rank keeps its own part of a plain model's tensor, and nothing is sent. If ranks load different
tensors, or only some ranks load, a parameter is put together of two models: it has new rows on rank
0 and old ones on rank 1. So a digest of what a parameter was given stays with its module until the
parameter is gathered next, and is then noted with its name (``rank_sequence.py``). Ranks may load
at different times and in different pieces; they compare what they noted soon after, and none waits
for another.

Not compared is what is not gathered before it is used: copies, which may come apart as under DDP;
parts of tensor parallelism; what ``unsharded`` reads, or a checkpoint saves, before a forward. Nor
is what torch's own backends compile.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from simplefsdp._torch import dispatch_mode
from simplefsdp.frontend.wrapped import layouts_of

# On a module: for each of its parameters, digests by what was given a value: the parameter itself,
# or state of its optimizer.
_DIGESTS = "_simple_fsdp_loaded"
_ELEMENTS = 8  # of a tensor that are looked at
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # those with digests


def note(module: nn.Module, name: str, what: str, value: Tensor | None) -> None:
    """Note what a parameter, or its optimizer's state, was given.

    Args:
        module: whose own parameter it is.
        name: the parameter's name there.
        what: was given a value, under a name that is the same on all ranks; the FQN for the
            parameter itself.
        value: the plain tensor, of the whole shape; None for a shard, which may differ.
    """
    layout = layouts_of(module).get(name)
    if layout is None or layout.spec.shard_ranks < 2:
        return
    digests = module.__dict__.setdefault(_DIGESTS, {}).setdefault(name, {})
    digests.pop(what, None)
    if value is not None:
        digests[what] = _digest(value)
        _modules[id(module)] = module


def taken(module: nn.Module, name: str) -> list[str]:
    """What was given to a parameter that is about to be gathered, a line each; it is compared once,
    so the next call gives nothing."""
    if not (digests := module.__dict__.get(_DIGESTS)):
        return []
    return [f"{what} ({digest})" for what, digest in sorted(digests.pop(name, {}).items())]


def taken_of(params: Sequence[object]) -> list[list[str]]:
    """:func:`taken` for each of ``params``, whichever living modules they are of."""
    if not _modules:
        return [[] for _ in params]
    lines: dict[int, list[str]] = {id(param): [] for param in params}
    for key, module in list(_modules.items()):
        for name in list(module.__dict__[_DIGESTS]):
            if (at := id(module._parameters.get(name))) in lines:
                lines[at] += taken(module, name)
        if not module.__dict__[_DIGESTS]:
            del _modules[key]
    return [lines[id(param)] for param in params]


def forget(params: Iterable[object]) -> None:
    """Forget what ``params`` were given: all ranks have given them other values since."""
    taken_of([*params])


def _digest(value: Tensor) -> str:
    """Of some elements, from the first to the last; "" for a tensor whose class or dtype hides
    them, or in a mode of the user's."""
    if type(value) is not Tensor or value.is_meta or not value.numel() or dispatch_mode():
        return ""
    places = torch.arange(_ELEMENTS, device="cpu") * (value.numel() - 1) // (_ELEMENTS - 1)
    value = value.reshape(1) if value.dim() == 0 else value
    try:
        some = value[torch.unravel_index(places.to(value.device), value.shape)]
        some = some.resolve_conj().abs() if some.is_complex() else some
        return f"{zlib.crc32(str(some.to(torch.float32).tolist()).encode()):08x}"
    except RuntimeError:
        return ""
