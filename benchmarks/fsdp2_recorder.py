"""Ops that run, FSDP2's among them, as a :class:`~inductor_passes.ir.program.Program`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed.fsdp  # registers its operators
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from inductor_passes.adapters.loops import touches_of
from inductor_passes.adapters.roofline import work_of_node
from inductor_passes.ir.program import Buffer, Collective, CollectiveKind, Op, Program
from inductor_passes.machine.cluster import Work

_COLLECTIVES: dict[object, CollectiveKind] = {
    torch.ops.c10d._allgather_base_.default: "gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce",
    torch.ops.c10d.allreduce_.default: "all_reduce",
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COPY_IN = torch.ops.fsdp.all_gather_copy_in.default
_COPY_OUT = torch.ops.fsdp.split_with_sizes_copy.default
# What FSDP2 calls the range in which it waits for the reduce before.
_REDUCE_WAIT = "FSDP::post_backward_rs_wait"


@dataclass
class _Pending:
    """A collective that nobody has waited for, and what must come after it."""

    start: Op
    behind: list[Op] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Notes the ops that run inside it, by the storages that they read and write.

    Attributes:
        ops: so far.
        work: of each compute op.
        use: what a storage is for, if it is not an activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.work: dict[str, Work] = {}
        self.use: dict[str, str] = {}
        self._buffers: dict[str, Buffer] = {}
        self._name_of: Any = WeakIdKeyDictionary()
        self._pending: dict[str, _Pending] = {}
        self._gathered: dict[str, Any] = {}
        self._number = itertools.count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(cls, (DTensor, AsyncCollectiveTensor)) for cls in types):
            return NotImplemented  # what they do to their plain tensors comes next
        kwargs = kwargs or {}
        given = {name: value for name, value in kwargs.items() if name != "out"}
        reads = self._names((args, given))
        self._resharded()
        out = func(*args, **kwargs)
        if func.namespace == "profiler":
            self._range(args)
        elif func.namespace in ("aten", "fsdp", "c10d", "_c10d_functional"):
            self._note(func, args, kwargs, out, reads)
        return out

    def _range(self, args: Sequence[Any]) -> None:
        if args and str(args[0]).startswith(_REDUCE_WAIT):
            reduces = (s for s, p in self._pending.items() if p.start.sends == "reduce")
            self._wait_for(next(reduces, ""))

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, reads: list[str]) -> None:
        if func is _WAIT:
            self._wait_for(reads[0])
            self._name_of[out.untyped_storage()] = reads[0]
            return
        if func is _COPY_OUT:
            self._wait_for(reads[0])
            for tensor in kwargs["out"]:  # their memory is given back when they are resharded
                self._new(tensor, "gathered parameters")
        written = _mutated(func, args, kwargs)
        writes = list(dict.fromkeys(self._names((written, out))))
        if func in _COLLECTIVES or func.namespace == "_c10d_functional":
            self._start(func, args, reads, writes)
        elif set(writes) - set(reads) or written or func is _COPY_IN:
            name = f"{func.__name__.split('.')[0]}_{next(self._number)}"
            self.work[name] = _work_of(func, args, kwargs, out)
            self._emit(Op(name, "compute", tuple(dict.fromkeys(reads)), tuple(writes)))

    def _start(self, func: Any, args: Any, reads: list[str], writes: list[str]) -> None:
        kind = _COLLECTIVES.get(func, "other")
        buffer = writes[0]
        sent = reads[-1] if kind == "reduce" else buffer
        if kind == "gather":
            self.use[buffer] = "gathered parameters"
        elif kind != "other":
            self.use[sent] = "full gradients" if kind == "reduce" else "gradient shards"
            self.use[buffer] = "gradient shards"
        number = next(self._number)
        filled = f"{buffer}.{number}"
        self._buffers[filled] = replace(self._buffers[buffer], name=filled)
        group, nbytes = _group(args), self._buffers[sent].nbytes
        collective = Collective(kind, group.group_name, group.size(), nbytes, "", fqns=("",))
        self._emit(
            Op(f"{kind}_{number}", "start", tuple(dict.fromkeys(reads)), (filled,), collective)
        )

    def _emit(self, op: Op) -> None:
        """Note an op: if it needs a collective's result, when somebody waits for that."""
        for name in (*op.reads, *op.writes):
            if (storage := self._buffers[name].storage) in self._pending:
                self._pending[storage].behind.append(op)
                return
        self.ops.append(op)
        if op.kind == "start":
            self._pending[self._buffers[op.writes[0]].storage] = _Pending(op)

    def _wait_for(self, storage: str) -> None:
        found = self._pending.pop(storage, None)
        if found is not None:
            self.ops.append(Op(f"wait_{found.start.name}", "wait", found.start.writes, ()))
            for op in found.behind:
                self._emit(op)

    def _names(self, values: Any) -> list[str]:
        """The storages of all tensors in ``values``, of those that are more than a number."""
        return [self._name(t) for t in _tensors(values) if t.dim() and t.numel()]

    def _name(self, tensor: Tensor) -> str:
        name = self._name_of.get(_local(tensor).untyped_storage())
        return self._new(tensor) if name is None else name

    def _new(self, tensor: Tensor, use: str = "") -> str:
        """A buffer that stands for the storage of ``tensor`` from now on."""
        storage = _local(tensor).untyped_storage()
        name = f"b{next(self._number)}"
        self._buffers[name] = Buffer(name, storage.nbytes())
        self._name_of[storage] = name
        if use:
            self.use[name] = use
            self._gathered[name] = storage
        else:
            weakref.finalize(storage, self._gone, name).atexit = False
        return name

    def _resharded(self) -> None:
        """Full parameters whose storages FSDP2 has emptied, to fill them again when gathered."""
        for name in [name for name, storage in self._gathered.items() if not storage.nbytes()]:
            del self._gathered[name]
            self._gone(name)

    def _gone(self, name: str) -> None:
        """A storage is released: now, not at its last use."""
        self._emit(Op(f"free_{next(self._number)}", "view", (name,), ()))

    def program(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> Program:
        """All ops so far, with the storages of ``grads`` as outputs and those of ``parameters``
        kept by the caller; what is read before it is written is an input."""
        while self._pending:
            self._wait_for(next(iter(self._pending)))
        outputs, kept = dict.fromkeys(self._names(grads)), set(self._names(parameters))
        self.use.update(dict.fromkeys(outputs, "gradient shards"))
        written: set[str] = set()
        inputs = dict.fromkeys(sorted(kept))
        for op in self.ops:
            inputs.update(dict.fromkeys(name for name in op.reads if name not in written))
            written.update(op.writes)
        return Program(
            tuple(self.ops), dict(self._buffers), tuple(inputs), frozenset(kept), tuple(outputs)
        ).verify()


def _work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """Operations by the formulas that graphs are counted by; bytes of what it reads and writes."""
    if func is _COPY_IN:
        return Work(nbytes=2 * sum(map(_nbytes, _tensors(args[0]))))
    given = {name: value for name, value in kwargs.items() if name != "out"}
    node = _node(func, args, kwargs, out)
    touched = [*_tensors((args, given)), *(_mutated(func, args, kwargs) or _tensors(out))]
    limit = touches_of(node)
    sizes = map(_nbytes, touched)
    nbytes = sum(sizes if limit is None else (min(n, limit) for n in sizes))
    work = work_of_node(node, nbytes, 1)
    for held in node.graph.nodes:
        held.meta.clear()  # a graph is a cycle: its tensors would outlive their time
    return work


def _node(func: Any, args: Any, kwargs: Any, out: Any) -> Node:
    """A node of a graph of its own that stands for a call."""
    graph = Graph()

    def placeholder(tensor: Tensor) -> Node:
        node = graph.placeholder("x")
        node.meta["val"] = tensor
        return node

    args, kwargs = pytree.tree_map_only(Tensor, placeholder, (args, kwargs))
    node = graph.call_function(func, args, kwargs)
    node.meta["val"] = out
    return node


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes in place."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def _group(args: Iterable[Any]) -> Any:
    """The process group among a collective's arguments: itself, or its name, the last string."""
    from torch.distributed import distributed_c10d

    names = [value for value in args if isinstance(value, str)]
    if names:
        return distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    is_group = torch.distributed.ProcessGroup
    boxed = [
        v for v in args if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v._type())
    ]
    return is_group.unbox(boxed[0])


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
