"""Full parameters that stay: gathered once, and read by every forward until the shards change.

FSDP2's ``unshard``, ``reshard`` and ``set_reshard_after_backward``: for a model that is small
enough, or for the micro-batches of one step, or for ``generate``.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from simplefsdp import _torch, rank_guard, rank_sequence
from simplefsdp._torch import is_same_view, local_tensor, version_of
from simplefsdp.frontend import living, loaded
from simplefsdp.frontend.gather import ON_META, gather_shard
from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.frontend.reading import is_traced_for_us
from simplefsdp.frontend.wrapped import KEPT, is_wrapped, layouts_of, mark_stays, shards_of
from simplefsdp.rank_sequence import PlainLoad

_PERHAPS = -2  # in the place of a version: the shard has been given away, and may be written to
_OF_SHARD = "_simple_fsdp_kept_of"  # on a shard: what is kept of it


@dataclass(eq=False)  # in sets, by identity
class _Kept:
    full: Tensor
    spec: GatherSpec
    # Of the shard that it was gathered from; below 0 if that was, or may be, written to since.
    version: int = -1
    memory: torch.UntypedStorage | None = None  # of that shard
    beside: WeakSet[_Kept] | None = None  # itself, and what is kept of other views of that memory
    readers: int = 0  # modules that read it: a tied parameter has several

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing is kept of a copied shard: a write to the copy would not be noted here."""

    def __reduce__(self) -> Any:
        """Nor of one that is saved: in its place is what ``torch.load`` makes without being told
        that the file may be trusted."""
        return OrderedDict, ()


def _kept_beside(param: Any) -> _Kept | None:
    """What is kept of ``param``."""
    kept = getattr(param, "__dict__", {}).get(_OF_SHARD)
    return kept if isinstance(kept, _Kept) else None  # None of a copied shard, {} of a saved one


def kept_of(module: nn.Module, name: str) -> Tensor | None:
    """The full parameter that is kept, in ``param_dtype``; None if it is gathered when read."""
    full: Tensor | None = module.__dict__.get(KEPT, {}).get(name)
    if full is None:
        return None
    if torch.compiler.is_compiling():  # refreshing() looks whose it is
        return full if is_traced_for_us() else None
    return full if _is_of(full, module._parameters[name]) else None


def _is_of(full: Tensor, param: Any) -> bool:
    """Whether ``full`` was gathered from ``param``. If not, ``param`` is another tensor that stands
    in the place of a parameter for a while."""
    kept = _kept_beside(param)
    return kept is not None and kept.full is full


@torch.compiler.disable
def keep(modules: Iterable[nn.Module]) -> None:
    """Gather all sharded parameters of ``modules``, and keep them; collective. What is kept already
    is gathered once more, since nothing tells of a write by pointer; it is written to only if it
    has changed, for a backward may still need it."""
    places = list(_shards_to_keep(modules))
    shards = [shard for *_, shard in places]
    given = dict(zip(map(id, shards), loaded.taken_of(shards), strict=True))  # not gathered yet
    for module, name, spec, shard in places:
        kept = _kept_beside(shard)
        if kept is None:
            if shard.is_meta:
                raise ValueError(f"{spec.fqn}: {ON_META}")
            kept = _Kept(_gather(shard, spec, given.pop(id(shard))), spec)
            shard.__dict__[_OF_SHARD] = kept
            _note_shard(shard, kept)
        elif id(shard) in given:
            _gather_again(shard, kept, given.pop(id(shard)))
        if module.__dict__[KEPT].get(name) is not kept.full:
            module.__dict__[KEPT][name] = kept.full
            kept.readers += 1
    _watch_writes()


def _shards_to_keep(
    modules: Iterable[nn.Module],
) -> Iterator[tuple[nn.Module, str, GatherSpec, DTensor]]:
    for module in modules:
        for name, layout in layouts_of(module).items():
            shard = module._parameters.get(name)
            # What a class of tensors gathers is not the full parameter: it is gathered as ever.
            if isinstance(shard, DTensor) and not layout.spec.tensor_class:
                yield module, name, layout.spec, shard


@torch.compiler.disable
def free(modules: Iterable[nn.Module]) -> None:
    """Free what is kept of ``modules``, also where other parameters have taken their places."""
    for module in modules:
        for name in module.__dict__.get(KEPT, {}):
            param = module._parameters.get(name)
            kept = _kept_beside(param)
            if kept is not None:
                kept.readers -= 1
                if not kept.readers:
                    del param.__dict__[_OF_SHARD]
        forget(module)


def forget(module: nn.Module) -> None:
    """Have ``module``, which is a copy of another, keep nothing; the other keeps what it has."""
    if is_wrapped(module):
        module.__dict__[KEPT] = {}


def free_everywhere(module: nn.Module) -> None:
    """Free what is kept of the own parameters of ``module``, in all modules that have them."""
    free([module])
    for _, shard in shards_of(module):
        if _kept_beside(shard) is not None:
            free(m for m in living.modules() if id(shard) in map(id, m._parameters.values()))


@contextmanager
def kept_stays(module: nn.Module) -> Iterator[None]:
    """Around code that may swap the tensors of the own parameters of ``module``: what is kept of
    them stays, and is gathered anew at the next forward."""
    with mark_stays(module, _OF_SHARD) as stayed:
        yield
    expect_writes(param for param, _ in stayed)


def share_versions(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Have writes to what ``state_dict`` has of the own parameters of ``module``, as a checkpoint
    is loaded into it, noticed, now and later.

    By then a forward may have gathered them anew. So these tensors share the versions of the
    shards: torch detaches below autograd, where a tensor gets a version of its own. Hooks may put
    others in their places, and a loader may write by pointers. So the next forward looks, too.
    """
    for name, shard in shards_of(module):
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) and value is not shard and is_same_view(value, shard):
            _torch.set_local_tensor(value, local_tensor(shard).detach())
        kept = _kept_beside(shard)
        if kept is not None and kept.version >= 0:
            kept.version = _PERHAPS


def expect_writes(params: Iterable[Any]) -> None:
    """Have the next forward gather what is kept of ``params`` anew: unseen writes may come."""
    for param in params:
        kept = _kept_beside(param)
        if kept is not None:
            kept.version, kept.memory = -1, None


# All that is kept, by the memory of the shard that it was gathered from.
_kept_of_memory: WeakValueDictionary[int, WeakSet[_Kept]] = WeakValueDictionary()


def _note_shard(param: DTensor, kept: _Kept) -> None:
    """Note that ``kept`` was gathered from the shard as it is now."""
    memory = _torch.memory_of(param)
    tells = not local_tensor(param).is_inference()
    kept.version, kept.memory = version_of(param) if tells else _PERHAPS, memory
    if memory is not None:
        kept.beside = _kept_of_memory.setdefault(memory._cdata, WeakSet())
        kept.beside.add(kept)


def _watch_writes() -> None:
    """Watch for writes that do not raise a shard's version: to ``param.data``, and to lists of
    DTensors, as by ``torch._foreach_*_``; and for optimizers' steps."""
    _torch.watch_writes_to_dtensors(_note_write)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Expect writes in each optimizer's step: other optimizers than torch's may write to shards,
    and those that know no DTensors have the local tensors as their parameters."""

    @torch.compiler.disable  # or it would become part of a compiled step
    def note_step(optimizer: Optimizer, *_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params if _kept_of_memory else ():
            _note_write_to(param if isinstance(param, DTensor) else param.detach())

    register_optimizer_step_post_hook(note_step)


def _note_write(value: Any) -> None:
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if _kept_of_memory and isinstance(tensor, DTensor):
            _note_write_to(tensor)


def _note_write_to(tensor: Tensor) -> None:
    memory = _torch.memory_of(tensor)
    if memory is None:
        return
    for kept in _kept_of_memory.get(memory._cdata, ()):
        # By now it may have been gathered from another shard, in another memory.
        if kept.memory is not None and kept.memory._cdata == memory._cdata:
            kept.version = -1


_ALONE = (
    "This rank alone may have called state_dict() of what unshard() keeps, or written to its "
    f"shards. Else: {rank_guard.LATE}"
)


@torch.compiler.disable
def refresh_all(model: nn.Module) -> None:
    """:func:`refresh` for all parameters of ``model``, before an eager forward."""
    if _kept_of_memory:
        refresh(shard for module in model.modules() for _, shard in shards_of(module))


def refresh(params: Iterable[Any], timeout_s: float | None = None) -> None:
    """Gather again what is kept of those ``params`` that have changed; collective, over the mesh of
    each, if any has. Ranks do not compare what that is if ``timeout_s`` is 0."""
    shards = {id(param): param for param in params}.values()
    kept = [(p, k) for p in shards if (k := _kept_beside(p)) is not None]
    stale = [(param, k) for param, k in kept if k.version != version_of(param)]
    if not stale:
        return
    lines = defaultdict[DeviceMesh, list[str]](list)
    for param, k in stale if timeout_s != 0 else ():
        lines[param.device_mesh].append(k.spec.fqn)
    for mesh, fqns in lines.items():
        ranks, what = rank_guard.ranks_of([mesh]), "what to gather again"
        rank_guard.agree(what, fqns, ranks, timeout_s, remember=False, late=_ALONE)
    given = loaded.taken_of([param for param, _ in stale])
    for (param, k), its in zip(stale, given, strict=True):
        if k.version == _PERHAPS:
            _gather_again(param, k, its)
        else:
            k.full.copy_(_gather(param, k.spec, its))
            _note_shard(param, k)


def refreshing(
    compiled: Callable[..., Any], places: Sequence[tuple[int, int]], timeout_s: float
) -> Callable[..., Any]:
    """``compiled``, with what is kept gathered again before a call if the shards have changed;
    ``places``, among its inputs, are of shards, each with that of what is kept of it."""
    if not places:
        return compiled

    def call(*args: Any) -> Any:
        if not all(_is_of(args[full], args[shard]) for shard, full in places):
            raise ValueError(
                "torch.func.functional_call, or swap_tensors, has put other tensors in the place "
                "of parameters that unshard() keeps in full, and these would be read: call "
                "reshard() before"
            )
        refresh([args[shard] for shard, _ in places], timeout_s)
        return compiled(*args)

    return call


def _gather_again(param: DTensor, kept: _Kept, given: Sequence[PlainLoad]) -> None:
    full = _gather(param, kept.spec, given)
    if not torch.equal(full, kept.full):
        kept.full.copy_(full)
    _note_shard(param, kept)


def _gather(param: DTensor, spec: GatherSpec, given: Sequence[PlainLoad]) -> Tensor:
    rank_sequence.note(spec.shard_group, rank_sequence.gathered([spec.fqn], given))
    with torch.inference_mode(False), torch.no_grad():
        full = gather_shard(local_tensor(param), spec)
        return full.clone() if spec.shard_ranks == 1 else full
