"""What each rank was given by ``load_state_dict`` of a plain model's tensors: is it the same?

Each rank keeps its part of them, and nothing is sent, so every rank must load the same. If one does
not, parameters would be put together of two models: new rows on rank 0, and old ones on rank 1.
Ranks may load at different times, and in different pieces, so nothing is compared then. Each rank
notes what it was given, and tells it in the process group's store when the parameter is gathered
next. When that gather has ended, all of its ranks have begun it, and told what they were given, if
anything: so it is compared, and no rank waits for another. Other names are an error. Other values
are a warning, since a few elements are looked at, which may differ by what each rank has rounded.

What is not gathered is not compared: copies on several ranks, which may come apart as under DDP.
Nor is what torch's own backends compile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_passes.adapters._torch import ranks_of_group
from simplefsdp._torch import dispatch_mode, has_no_data, local_tensor, version_of
from simplefsdp.frontend.wrapped import layouts_of
from simplefsdp.rank_guard import RankMismatchError, ranks_of, store_of

log = logging.getLogger("simplefsdp")

_ELEMENTS = 8  # of a tensor that are looked at
# Of float32, and of what may have been bfloat16, by its eighth.
_TOLERANCE, _ROUNDED = 1e-3, 2.0**-7


@dataclass
class _Given:
    """What plain tensors a parameter was given since its ranks compared last."""

    # Whose parameter it is, under which name: nothing is noted on the parameter, which may be
    # copied, pickled or swapped.
    owner: weakref.ref[nn.Module]
    name: str
    ranks: tuple[int, ...]  # that gather it
    some: dict[str, Tensor] = field(default_factory=dict)  # by what was given, some elements of it
    version: int = -1  # of the parameter when it had got a value
    may_be_written: bool = False  # since, which its version does not tell
    told: tuple[str, int] | None = None  # under which names, and for which time

    def is_of(self, param: object) -> bool:
        """Whether ``param`` is still that parameter, and no other with its ``id``."""
        owner = self.owner()
        return owner is not None and owner._parameters.get(self.name) is param


_given: dict[int, _Given] = {}  # by the ``id`` of a parameter


class _Told(NamedTuple):
    """What this rank has told of parameters that some ranks are about to gather."""

    ranks: tuple[int, ...]
    params: list[DTensor]
    given: list[_Given]
    names: str  # a digest of the names of what they were given
    turn: int  # which time this rank has told something under these names

    @property
    def prefix(self) -> str:
        """Of the keys in the store."""
        return f"given/{self.names}/{self.turn}"

    @property
    def some(self) -> list[tuple[str, Tensor]]:
        """Some elements of what they were given, by name."""
        return _some_by_name(self.given)


# By the default process group, and the ranks of which this is the lowest: the keys of what they
# compared last.
_compared: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], set[str]]]
_compared = weakref.WeakKeyDictionary()


def note(owner: nn.Module, name: str, what: str, value: Tensor | None) -> None:
    """Note that a parameter was given a plain ``value``, or its optimizer's state for it was; or,
    if that is None, a shard.

    Args:
        owner: the module whose own parameter it is.
        name: the parameter's name there.
        what: was given a value, under a name that is the same on all ranks; the FQN for the
            parameter itself.
        value: of the whole shape.
    """
    param, spec = owner._parameters.get(name), layouts_of(owner)[name].spec
    if not isinstance(param, DTensor) or has_no_data(local_tensor(param)):
        return
    given = _given_to(param)
    if given is None:
        if value is None or spec.shard_ranks < 2 or not ranks_of([param.device_mesh]):
            return
        ranks = ranks_of_group(spec.shard_group) or [dist.get_rank()]
        given = _Given(weakref.ref(owner), name, tuple(sorted(ranks)))
        for key in [key for key, old in _given.items() if old.owner() is None]:
            del _given[key]
        _given[id(param)] = given
    given.some.pop(what, None)
    given.told = None
    if value is not None:
        given.some[what] = _some_of(value)
    if what == spec.fqn:
        given.version, given.may_be_written = version_of(param), False


def _given_to(param: object) -> _Given | None:
    given = _given.get(id(param))
    return given if given is not None and given.is_of(param) else None


def expect_writes(params: Iterable[Any]) -> None:
    """Have ranks that were given other names of ``params`` warn, and not raise: they may be written
    to unseen, as by a checkpoint that is loaded into what ``state_dict()`` gave."""
    for given in map(_given_to, params) if _given else ():
        if given is not None:
            given.may_be_written = True


def tell(params: Iterable[Any]) -> list[_Told]:
    """Before ``params`` are gathered, tell their other ranks what this one was given. When they
    have been gathered, call :func:`compare` with what this returns."""
    if not _given or not dist.is_initialized():
        return []
    of: defaultdict[tuple[int, ...], list[DTensor]] = defaultdict(list)
    for param in params:
        given = _given_to(param)
        if given is not None and given.some:
            # A rank may have filled in its own rows, so that this is told all the same.
            given.may_be_written |= given.version not in (version_of(param), -1)
            of[given.ranks].append(param)
    return [_tell(ranks, given_to) for ranks, given_to in of.items()]


def _tell(ranks: tuple[int, ...], params: list[DTensor]) -> _Told:
    given, store = [_given[id(param)] for param in params], store_of(ranks)
    some = _some_by_name(given)
    names = hashlib.sha256("\n".join(name for name, _ in some).encode()).hexdigest()
    told = {one.told for one in given}
    before = told.pop() if len(told) == 1 else None
    if before is not None and before[0] == names:  # and not compared, since something raised
        return _Told(ranks, params, given, *before)
    # As many times as on the other ranks. The store counts: it may outlive the process group.
    turn = store.add(f"given/{names}/turns/{dist.get_rank()}", 1)
    made = _Told(ranks, params, given, names, turn)
    if dist.get_rank() == min(ranks):
        store.set(f"{made.prefix}/values", json.dumps([v.tolist() for _, v in some]))
    store.add(f"{made.prefix}/ranks", 1)
    for one in given:
        one.told = names, turn
    return made


def _some_by_name(given: Iterable[_Given]) -> list[tuple[str, Tensor]]:
    # Models in one graph may have the same names, in the same order on all ranks.
    return sorted((item for one in given for item in one.some.items()), key=lambda item: item[0])


def compare(all_told: Sequence[_Told]) -> None:
    """Compare with the other ranks what this one has told; call it when that has been gathered.

    Raises:
        RankMismatchError: others were given other names, or nothing; only a warning, if the
            parameters may have got other values since, see :func:`expect_writes`.
    """
    if not all_told:
        return
    if (device := all_told[0].params[0].device).type != "cpu":
        # Else the gather may not have begun on all ranks.
        torch.accelerator.current_stream(device).synchronize()
    ended: list[_Told] = []
    refused: list[_Told] = []
    for told in all_told:
        (ended if _have_all_told(told) else refused).append(told)
    _forget(ended)
    _delete_compared(ended)
    if not all(one.may_be_written for told in refused for one in told.given):
        raise RankMismatchError(_refused(refused))
    if refused:
        log.warning("%s", _refused(refused))
    _forget(refused)


def _forget(all_told: Iterable[_Told]) -> None:
    for param in (param for told in all_told for param in told.params):
        _given.pop(id(param), None)


def _have_all_told(told: _Told) -> bool:
    """Whether all ranks were given the same names; if so, warn of other values. If not, this one
    has them told again for the same time."""
    store = store_of(told.ranks)
    if store.add(f"{told.prefix}/ranks", 0) < len(told.ranks):
        if told.given[0].told is not None:  # it is, where a parameter was gathered several times
            store.add(f"{told.prefix}/ranks", -1)
            store.add(f"given/{told.names}/turns/{dist.get_rank()}", -1)
        for one in told.given:
            one.told = None
        return False
    _compare_values(told, json.loads(store.get(f"{told.prefix}/values")))
    return True


def _delete_compared(all_told: Sequence[_Told]) -> None:
    """Delete from the store what was compared before: all ranks that have told this have ended
    that."""
    compared = _compared.setdefault(dist.group.WORLD, {})
    for ranks in {told.ranks for told in all_told if dist.get_rank() == min(told.ranks)}:
        now = {told.prefix for told in all_told if told.ranks == ranks}
        for prefix in compared.get(ranks, set()) - now:
            for what in ("ranks", "values"):
                store_of(ranks).delete_key(f"{prefix}/{what}")
        compared[ranks] = now


def comparing(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``compiled``, which gathers its arguments at ``places``, with what ranks were given of them
    compared."""

    def call(*args: Any) -> Any:
        told = tell(args[place] for place in places)
        results = compiled(*args)
        compare(told)
        return results

    return call


def _refused(all_told: Sequence[_Told]) -> str:
    names = [name for told in all_told for name, _ in told.some]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}: load_state_dict gave rank {dist.get_rank()} a plain model's tensors, "
        f"and not all of the {len(all_told[0].ranks)} ranks that share them got the same. Each "
        "rank keeps its part, so what was just computed is of parameters put together of two "
        "models: load them on all ranks before the next forward. With the tensors on rank 0 only, "
        "use torch.distributed.checkpoint.state_dict.set_model_state_dict(..., options="
        "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
    )


def _compare_values(told: _Told, wanted: Sequence[list[float]]) -> None:
    pairs = zip(told.some, wanted, strict=True)
    if apart := [name for (name, own), other in pairs if not _are_close(own.tolist(), other)]:
        log.warning(
            "%s: load_state_dict was given other values on rank %d than on rank %d%s. Each rank "
            "keeps its part of a plain model's tensors, so all must load the same ones, unless "
            "each has filled in its own rows only",
            apart[0],
            dist.get_rank(),
            min(told.ranks),
            f", and for {len(apart) - 1} more parameters" if len(apart) > 1 else "",
        )


def _some_of(value: Tensor) -> Tensor:
    """Some elements, from the first to the last: ``[n]``, in float64; in front of them, how close
    they must be to those of another rank. Empty for a tensor whose class or dtype hides them, or in
    a mode of the user's."""
    tolerance = _TOLERANCE if value.dtype.itemsize > 2 else _ROUNDED
    nothing = torch.empty(0, dtype=torch.float64, device="cpu")
    if type(value) is not Tensor or value.is_meta or not value.numel() or dispatch_mode():
        return nothing
    value = value.reshape(1) if value.dim() == 0 else value
    places = torch.arange(_ELEMENTS, device="cpu") * (value.numel() - 1) // (_ELEMENTS - 1)
    try:
        some = value[torch.unravel_index(places.to(value.device), value.shape)]
        some = some.resolve_conj().abs() if some.is_complex() else some
        some = some.to(torch.float32).to(torch.float64).cpu()  # not all dtypes have the second cast
    except RuntimeError:
        return nothing
    return torch.cat([torch.tensor([tolerance], dtype=torch.float64, device="cpu"), some])


def _are_close(one: list[float], other: list[float]) -> bool:
    """Whether elements, each behind a tolerance, are equal but for it, of the largest of them."""
    if not one or not other or one[1:] == other[1:]:
        return True
    if not all(map(math.isfinite, (*one, *other))):
        return str(one[1:]) == str(other[1:])
    least = max(one[0], other[0]) * max(map(abs, (*one[1:], *other[1:])))
    return all(abs(a - b) <= least for a, b in zip(one[1:], other[1:], strict=True))
