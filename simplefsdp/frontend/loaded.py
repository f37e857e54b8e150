"""What ``load_state_dict`` gave parameters on this rank, for the ranks to compare.

Each rank keeps its own part of a plain model's tensor, and nothing is sent. If ranks load different
tensors, or only some ranks load, a parameter is put together of two models: it has new rows on rank
0 and old ones on rank 1. So what a parameter was given stays with its module until the parameter is
gathered next, and is then noted with its name (``rank_sequence.py``). Ranks may load at different
times and in different pieces; they compare what they noted soon after, and none waits for another.

Not compared is what is not gathered: copies, which may come apart as under DDP, and parts of tensor
parallelism. Nor is what ``unsharded`` reads, or a checkpoint saves, before a forward, what torch's
own backends compile, and what the first few gathers of a small model give, if no more follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import dispatch_mode, version_of
from simplefsdp.frontend.wrapped import layouts_of
from simplefsdp.rank_sequence import PlainLoad


class _Given(NamedTuple):
    digest: str
    version: int  # of the parameter when it had got the value


# On a module: for each of its parameters, by what was given a value: the parameter itself, or state
# of its optimizer.
_GIVEN = "_simple_fsdp_loaded"
_ELEMENTS = 8  # of a tensor that are looked at
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # those that were given some


class _Loads:
    count = 0  # so far


def loads() -> int:
    """How many values were noted so far: if no more than when :func:`taken_of` was asked about some
    parameters, it finds nothing for these."""
    return _Loads.count


def note(module: nn.Module, name: str, what: str, value: Tensor | None) -> None:
    """Note what a parameter, or its optimizer's state, was given.

    Args:
        module: whose own parameter it is.
        name: the parameter's name there.
        what: was given a value, under a name that is the same on all ranks; the FQN for the
            parameter itself.
        value: the plain tensor, of the whole shape; None for a shard, which may differ.
    """
    layout, param = layouts_of(module).get(name), module._parameters.get(name)
    if layout is None or layout.spec.shard_ranks < 2 or not isinstance(param, DTensor):
        return
    given = module.__dict__.setdefault(_GIVEN, {}).setdefault(name, {})
    given.pop(what, None)
    if value is not None:
        given[what] = _Given(_digest(value), version_of(param))
        remember(module)


def remember(module: nn.Module) -> None:
    """Have :func:`taken_of` look at ``module``, which may be a copy, if it was given anything."""
    if module.__dict__.get(_GIVEN):
        _modules[id(module)] = module
        _Loads.count += 1


def taken(module: nn.Module, name: str) -> list[PlainLoad]:
    """What was given to a parameter that is about to be gathered. It is compared once, so the next
    call gives nothing."""
    if not (given := module.__dict__.get(_GIVEN, {}).pop(name, None)):
        return []
    param = module._parameters.get(name)
    version = version_of(param) if isinstance(param, DTensor) else -1
    return [
        PlainLoad(what, one.digest, one.version != version) for what, one in sorted(given.items())
    ]


def taken_of(params: Sequence[object]) -> list[list[PlainLoad]]:
    """:func:`taken` for each of ``params``, whichever living modules they are of."""
    found: dict[int, list[PlainLoad]] = {id(param): [] for param in params}
    for key, module in list(_modules.items()):
        for name in list(module.__dict__[_GIVEN]):
            if (at := id(module._parameters.get(name))) in found:
                found[at] += taken(module, name)
        if not module.__dict__[_GIVEN]:
            del _modules[key]
    return [found[id(param)] for param in params]


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
