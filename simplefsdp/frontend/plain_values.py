"""A plain model's tensors, loaded by ``load_state_dict``: each rank keeps its own part of them.

Nothing is sent then, so every rank must load the same. If one does not, parameters would be put
together of two models: new rows on rank 0, and old ones on rank 1. Ranks may load at different
times, and in different pieces, so nothing is compared then. Each rank notes on a parameter what it
was given, and tells it in the process group's store when the parameter is gathered next. When that
gather has ended, all of its ranks have begun it, and told what they were given, if anything: so it
is compared, and no rank waits for another. Other names are an error. Other values are a warning,
since a few elements are looked at, which may differ by what each rank has rounded.

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
from torch.distributed.tensor import DTensor, distribute_tensor

from inductor_passes.adapters._torch import ranks_of_group
from simplefsdp._torch import dispatch_mode, has_memory, has_no_data, local_tensor, version_of
from simplefsdp.frontend.wrapped import ParameterLayout, layouts_of
from simplefsdp.rank_guard import RankMismatchError, ranks_of, store_of

log = logging.getLogger("simplefsdp")

_GIVEN = "_simple_fsdp_given"  # on a parameter: its _Given
_REPLACED = "_simple_fsdp_replaced"  # on one that was: by what value, and the shard made of that
_ELEMENTS = 8  # of a tensor that are looked at
# Of float32, and of what may have been bfloat16, by its eighth.
_TOLERANCE, _ROUNDED = 1e-3, 2.0**-7


@dataclass(eq=False)  # in a set, by identity
class _Given:
    """What plain tensors a parameter was given since its ranks compared last."""

    ranks: tuple[int, ...]  # that gather it
    fqn: str
    some: dict[str, Tensor] = field(default_factory=dict)  # by name, some elements of each
    version: int = -1  # of the parameter when it had got a value
    may_be_written: bool = False  # since, which its version does not tell

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a parameter was given nothing."""


_all: weakref.WeakSet[_Given] = weakref.WeakSet()


class _Told(NamedTuple):
    """What this rank has told of parameters that some ranks are about to gather."""

    ranks: tuple[int, ...]
    params: list[DTensor]
    some: list[tuple[str, Tensor]]  # some elements of what they were given, by name
    names: str  # a digest of the names
    turn: int  # how often these ranks had compared what they were given under these names


# By the default process group: by ranks and names, the turn; and whether this rank has come to it.
_turns: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], tuple[int, bool]]] = (
    weakref.WeakKeyDictionary()
)


def load(
    module: nn.Module,
    load_it: Callable[..., None],
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *args: Any,
) -> None:
    """Have ``load_it``, torch's method, put ``state_dict`` into the own parameters of ``module``.
    Plain values of the whole shape become DTensors of this rank's part, and are noted."""
    given: dict[str, Tensor | None] = {}

    def shard(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        assigns = bool(metadata.get("assign_to_params_buffers"))
        _shard_plain(module, state_dict, prefix, assigns, given)

    shard(module, state_dict, prefix)
    # And behind the user's hooks, which may give values other names.
    handle = module.register_load_state_dict_pre_hook(shard)
    try:
        load_it(module, state_dict, prefix, metadata, *args)
    finally:
        handle.remove()
    for name, value in given.items():
        param, layout = module._parameters.get(name), layouts_of(module)[name]
        if isinstance(param, DTensor):
            note(param, layout, layout.spec.fqn, value)


def _shard_plain(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    assigns: bool,
    given: dict[str, Tensor | None],
) -> None:
    """Replace values in ``state_dict``; ``given`` gets the plain ones, and None for shards."""
    for name in layouts_of(module):
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, Tensor) or not isinstance(param, DTensor):
            continue
        if isinstance(value, DTensor):
            check_mesh(layouts_of(module)[name].spec.fqn, value, param)
            given.setdefault(name, None)
        elif value.shape == param.shape:
            given[name] = value.detach()
            state_dict[prefix + name] = _shard_of(value, param, assigns)


def check_mesh(name: str, value: DTensor, param: DTensor) -> None:
    """Refuse a shard over another mesh than that of ``param``, for which it is to be loaded."""
    if value.device_mesh != param.device_mesh:
        raise ValueError(
            f"{name}: expected a shard over {param.device_mesh}, got one over {value.device_mesh}; "
            "what FSDP2 saved beside tensor parallelism, or other ranks, is put together by "
            "torch.distributed.checkpoint: save it by dcp.save there, and load it by dcp.load"
        )


def _shard_of(value: Tensor, param: DTensor, assigns: bool) -> DTensor:
    """This rank's part of ``value``. If that takes the place of ``param``, which is tied, and of
    which each module is given the same value, each gets the same part."""
    known, made = param.__dict__.get(_REPLACED, (None, None))
    if assigns and made is not None and (other := known()) is not None and _is_one(value, other):
        return made  # type: ignore[no-any-return]
    made = distribute_tensor(
        value.detach(), param.device_mesh, param.placements, src_data_rank=None
    )
    if assigns:
        setattr(param, _REPLACED, (weakref.ref(value), made))
    return made


def _is_one(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or the same view of one."""
    return value is other or (
        has_memory(value)
        and value.data_ptr() == other.data_ptr()
        and (value.shape, value.stride(), value.dtype) == (other.shape, other.stride(), other.dtype)
    )


def note(param: DTensor, layout: ParameterLayout, name: str, value: Tensor | None) -> None:
    """Note that ``param`` was given a plain ``value``, or its optimizer's state for it was, under a
    name that is the same on all ranks; or, if that is None, a shard."""
    given: _Given | None = param.__dict__.get(_GIVEN)
    if given is None:
        gathers = layout.spec.shard_ranks > 1 and ranks_of([param.device_mesh])
        if value is None or not gathers or has_no_data(local_tensor(param)):
            return
        ranks = ranks_of_group(layout.spec.shard_group) or [dist.get_rank()]
        given = _Given(tuple(sorted(ranks)), layout.spec.fqn)
        setattr(param, _GIVEN, given)
        _all.add(given)
    given.some.pop(name, None)
    if value is not None:
        given.some[name] = _some_of(value)
    if name == given.fqn:
        given.version, given.may_be_written = version_of(param), False


def expect_writes(params: Iterable[Any]) -> None:
    """Have ranks that were given other names of ``params`` warn, and not raise: they may be written
    to unseen, as by a checkpoint that is loaded into what ``state_dict()`` gave."""
    for param in params if _all else ():
        given = getattr(param, "__dict__", {}).get(_GIVEN)
        if given is not None:
            given.may_be_written = True


def tell(params: Iterable[Any]) -> list[_Told]:
    """Before ``params`` are gathered, tell their other ranks what this one was given. When they
    have been gathered, call :func:`compare` with what this returns."""
    if not _all or not dist.is_initialized():
        return []
    of: defaultdict[tuple[int, ...], list[DTensor]] = defaultdict(list)
    for param in params:
        given: _Given | None = param.__dict__.get(_GIVEN)
        if given is None:
            continue
        if given.version != version_of(param):
            given.some.pop(given.fqn, None)  # it has got another value since
        if given.some:
            of[given.ranks].append(param)
        else:
            del param.__dict__[_GIVEN]
    return [_told(ranks, given_to) for ranks, given_to in of.items()]


def _told(ranks: tuple[int, ...], params: list[DTensor]) -> _Told:
    given = [item for param in params for item in param.__dict__[_GIVEN].some.items()]
    some = sorted(given, key=lambda item: item[0])  # models in one graph may have the same names
    names = hashlib.sha256("\n".join(name for name, _ in some).encode()).hexdigest()
    turns = _turns.setdefault(dist.group.WORLD, {})
    turn, has_come = turns.get((ranks, names), (0, False))
    told = _Told(ranks, params, some, names, turn)
    if dist.get_rank() == min(ranks):
        values = json.dumps([values.tolist() for _, values in some])
        store_of(ranks).set(_key(told, "values"), values)
    if not has_come:
        store_of(ranks).add(_key(told, "ranks"), 1)
        turns[ranks, names] = turn, True
    return told


def _key(told: _Told, what: str, before: int = 0) -> str:
    return f"given/{told.names}/{told.turn - before}/{what}"


def compare(all_told: Sequence[_Told]) -> None:
    """Compare with the other ranks what this one has told; call it when that has been gathered.

    Raises:
        RankMismatchError: others were given other names, or nothing; only a warning, if they may
            have got other values since, see :func:`expect_writes`.
    """
    for told in all_told:
        device = told.params[0].device
        if device.type != "cpu":  # else the gather may not have begun on all ranks
            torch.accelerator.synchronize(device)
        store, turns = store_of(told.ranks), _turns[dist.group.WORLD]
        came = store.add(_key(told, "ranks"), 0)
        if came < len(told.ranks):
            store.add(_key(told, "ranks"), -1)
            turns[told.ranks, told.names] = told.turn, False
            if not all(param.__dict__[_GIVEN].may_be_written for param in told.params):
                raise RankMismatchError(_refused(told, came))
            log.warning("%s", _refused(told, came))
            _forget(told.params)
            continue
        _compare_values(told, json.loads(store.get(_key(told, "values"))))
        if dist.get_rank() == min(told.ranks) and told.turn:
            # Of the turn before, which all have ended that have come to this one.
            for what in ("ranks", "values"):
                store.delete_key(_key(told, what, before=1))
        turns[told.ranks, told.names] = told.turn + 1, False
        _forget(told.params)


def _forget(params: Iterable[DTensor]) -> None:
    for param in params:
        param.__dict__.pop(_GIVEN, None)


def comparing(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``compiled``, which gathers its arguments at ``places``, with what ranks were given of them
    compared."""

    def call(*args: Any) -> Any:
        told = tell(args[place] for place in places)
        results = compiled(*args)
        compare(told)
        return results

    return call


def _refused(told: _Told, came: int) -> str:
    first, more = told.some[0][0], len(told.some) - 1
    return (
        f"{first}{f' and {more} more' if more else ''}: load_state_dict gave rank "
        f"{dist.get_rank()} a plain model's tensors, and only {came} of the {len(told.ranks)} "
        "ranks that share them got the same. Each rank keeps its part, so parameters would be put "
        "together of two models: load them on all ranks before the next forward. With the tensors "
        "on rank 0 only, use torch.distributed.checkpoint.state_dict.set_model_state_dict(..., "
        "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
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
