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
from simplefsdp.rank_guard import RankMismatchError, digest_of, ranks_of, store_of

log = logging.getLogger("simplefsdp")

_KEPT = 8  # turns whose values stay in the store: no rank is so far ahead of another
_ELEMENTS = 8  # of a tensor that are looked at
# Of float32, and of what may have been bfloat16, by its eighth.
_TOLERANCE, _ROUNDED = 1e-3, 2.0**-7


@dataclass
class _Turn:
    """What this rank has told of parameters that some ranks gather, in the store."""

    ranks: tuple[int, ...]
    names: str  # a digest of the names of what the parameters were given
    number: int  # which time this rank has told something under these names
    world: weakref.ref[Any] = field(default_factory=lambda: weakref.ref(dist.group.WORLD))
    is_open: bool = True  # until it is compared, or taken back

    @property
    def came(self) -> str:
        """The key under which ranks are counted."""
        return f"given/{self.names}/{self.number}/ranks"

    @property
    def values(self) -> str:
        """The key of the lowest rank's values, which is used again some turns later."""
        return f"given/{self.names}/{self.number % _KEPT}/values"

    def goes_on(self) -> bool:
        """Whether it is open, and the default process group is that of then."""
        return self.is_open and dist.is_initialized() and self.world() is dist.group.WORLD

    def all_came(self) -> bool:
        """Whether all ranks have told something under these names, so often. If not, this rank
        takes back what it told."""
        store = store_of(self.ranks)
        found = store.add(self.came, 0) >= len(self.ranks)
        if not found:
            store.add(self.came, -1)
            store.add(_turns(self.names), -1)
        self.is_open = False
        return bool(found)


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
    turn: _Turn | None = None  # in which it was told, and not compared yet

    def is_of(self, param: object) -> bool:
        """Whether ``param`` is still that parameter, and no other with its ``id``."""
        owner = self.owner()
        return owner is not None and owner._parameters.get(self.name) is param

    def settle(self) -> None:
        """End the turn in which it was told, if that was not compared, since something raised."""
        if self.turn is not None and self.turn.goes_on():
            self.turn.all_came()
        self.turn = None


_given: dict[int, _Given] = {}  # by the ``id`` of a parameter


class _Told(NamedTuple):
    """What this rank has told of parameters that are about to be gathered."""

    turn: _Turn
    given: list[tuple[DTensor, _Given]]
    some: list[tuple[str, Tensor]]  # some elements of what they were given, by name


def _turns(names: str) -> str:
    """The key of how often this rank has told something under ``names``. The store counts, since it
    may outlive the process group."""
    return f"given/{names}/turns/{dist.get_rank()}"


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
    param, layout = owner._parameters.get(name), layouts_of(owner).get(name)
    if layout is None or not isinstance(param, DTensor) or has_no_data(local_tensor(param)):
        return
    spec, given = layout.spec, _given_to(param)
    if given is None:
        if value is None or spec.shard_ranks < 2 or not ranks_of([param.device_mesh]):
            return
        ranks = ranks_of_group(spec.shard_group) or [dist.get_rank()]
        given = _Given(weakref.ref(owner), name, tuple(sorted(ranks)))
        _forget_replaced()
        _given[id(param)] = given
    given.settle()
    given.some.pop(what, None)
    if value is not None:
        given.some[what] = _some_of(value)
    if what == spec.fqn:
        given.version, given.may_be_written = version_of(param), False


def _forget_replaced() -> None:
    for key, given in list(_given.items()):
        owner = given.owner()
        if owner is None or id(owner._parameters.get(given.name)) != key:
            del _given[key]


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
    of: defaultdict[tuple[int, ...], list[tuple[DTensor, _Given]]] = defaultdict(list)
    for param in params:
        given = _given_to(param)
        if given is not None and given.some:
            # A rank may have filled in its own rows, so that this is told all the same.
            given.may_be_written |= given.version not in (version_of(param), -1)
            of[given.ranks].append((param, given))
    return [_tell(ranks, given_to) for ranks, given_to in of.items()]


def _tell(ranks: tuple[int, ...], given_to: list[tuple[DTensor, _Given]]) -> _Told:
    given = [one for _, one in given_to]
    # Models in one graph may have the same names, in the same order on all ranks.
    some = sorted((item for one in given for item in one.some.items()), key=lambda item: item[0])
    names, store = digest_of(name for name, _ in some), store_of(ranks)
    turn = given[0].turn
    is_told = turn is not None and turn.goes_on() and turn.names == names
    if turn is None or not is_told or any(one.turn is not turn for one in given):
        for one in given:
            one.settle()
        turn = _Turn(ranks, names, store.add(_turns(names), 1))
        if dist.get_rank() == min(ranks):
            store.set(turn.values, json.dumps([values.tolist() for _, values in some]))
        store.add(turn.came, 1)
        for one in given:
            one.turn = turn
    return _Told(turn, given_to, some)


def compare(all_told: Sequence[_Told]) -> None:
    """Compare with the other ranks what this one has told; call it when that has been gathered.

    Raises:
        RankMismatchError: others were given other names, or nothing; only a warning, if the
            parameters may have got other values since, see :func:`expect_writes`.
    """
    if not all_told:
        return
    if (device := all_told[0].given[0][0].device).type != "cpu":
        # Else the gather may not have begun on all ranks.
        torch.accelerator.current_stream(device).synchronize()
    # Not open: the parameters were gathered several times.
    refused = [told for told in all_told if told.turn.is_open and not _is_the_same(told)]
    if not all(one.may_be_written for told in refused for _, one in told.given):
        raise RankMismatchError(_refused(refused))
    if refused:
        log.warning("%s", _refused(refused))
    for told in refused:
        _forget(told)


def take_back(all_told: Sequence[_Told]) -> None:
    """Call this in place of :func:`compare` if something raised: what not all ranks have told,
    since a gather did not end, is to be told again."""
    for told in all_told:
        if told.turn.is_open and told.given[0][0].device.type == "cpu":  # else it may go on
            _is_the_same(told)


def _is_the_same(told: _Told) -> bool:
    """Whether all ranks were given the same names; if so, warn of other values."""
    if not told.turn.all_came():
        return False
    _compare_values(told)
    _forget(told)
    return True


def _forget(told: _Told) -> None:
    for param, given in told.given:
        if given.turn is told.turn and _given.get(id(param)) is given:
            del _given[id(param)]


def comparing(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``compiled``, which gathers its arguments at ``places``, with what ranks were given of them
    compared."""

    def call(*args: Any) -> Any:
        told = tell(args[place] for place in places)
        try:
            results = compiled(*args)
        except BaseException:
            take_back(told)
            raise
        compare(told)
        return results

    return call


def _refused(all_told: Sequence[_Told]) -> str:
    names, ranks = [name for told in all_told for name, _ in told.some], all_told[0].turn.ranks
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}: load_state_dict gave rank {dist.get_rank()} a plain model's tensors, "
        f"and not all of the {len(ranks)} ranks that share them got the same. Each "
        "rank keeps its part, so what was just computed is of parameters put together of two "
        "models: load them on all ranks before the next forward. With the tensors on rank 0 only, "
        "use torch.distributed.checkpoint.state_dict.set_model_state_dict(..., options="
        "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
    )


def _compare_values(told: _Told) -> None:
    ranks = told.turn.ranks
    wanted = json.loads(store_of(ranks).get(told.turn.values))
    pairs = zip(told.some, wanted, strict=True)
    if apart := [name for (name, own), other in pairs if not _are_close(own.tolist(), other)]:
        log.warning(
            "%s: load_state_dict was given other values on rank %d than on rank %d%s. Each rank "
            "keeps its part of a plain model's tensors, so all must load the same ones, unless "
            "each has filled in its own rows only",
            apart[0],
            dist.get_rank(),
            min(ranks),
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
