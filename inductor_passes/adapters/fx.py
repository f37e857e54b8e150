"""A torch.fx graph <-> a :class:`Program`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import (
    by_name,
    call_of,
    has_schema,
    is_size,
    note_values,
)
from inductor_passes.adapters.loops import nbytes_of, results_of
from inductor_passes.adapters.units import Part, Piece, in_units, parts_of, pieces_of
from inductor_passes.ir.program import Buffer, Collective, CollectiveKind, Kind, Op, Program

FqnOf = Callable[[Node], str | None]

_ops = torch.ops._c10d_functional
KIND_OF: dict[object, CollectiveKind] = {
    _ops.all_gather_into_tensor.default: "gather",
    _ops.all_gather_into_tensor_coalesced.default: "gather",
    _ops.all_gather_into_tensor_out.default: "gather",
    _ops.reduce_scatter_tensor.default: "reduce",
    _ops.reduce_scatter_tensor_coalesced.default: "reduce",
    _ops.all_reduce.default: "all_reduce",
    _ops.all_reduce_coalesced.default: "all_reduce",
}
_MARK = "inductor_passes_bucket"
_KEPT = "inductor_passes_kept"  # on an input
_UNIT = "inductor_passes_unit"  # on a node: its unit, and its place before planning
# Ops that draw random numbers or have unknown effects keep their order: they write these.
_RANDOM, _EFFECTS = "random state", "effects"


class BucketMark(NamedTuple):
    """What the passes note on the start of a bucket, for whoever reads the graph later."""

    label: str
    fqns: tuple[str, ...]
    window: int = 0


def mark(start: Node, label: str, fqns: tuple[str, ...], window: int = 0) -> None:
    """Note on a start node which bucket it is, or is part of."""
    start.meta[_MARK] = BucketMark(label, fqns, window)


@dataclass(frozen=True)
class Reading:
    """A program and where it came from."""

    program: Program  # the graph's ops; placeholders and constants are inputs
    # The nodes of each op, by its name. A start that returns a list has several: itself and the
    # ``getitem`` of each result.
    nodes: dict[str, tuple[Node, ...]]


def keep_written(graph: Graph, is_kept: Callable[[Node], bool]) -> None:
    """Mark inputs that ``graph`` writes to as kept by the caller, as the parameters that it gathers
    are: the state of an optimizer exists before and after the graph.

    Args:
        graph: whose writes to inputs are copies.
        is_kept: whether the input to which a value is copied is kept.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[:2]
        if isinstance(target, Node) and target.op == "placeholder" and is_kept(value):
            target.meta[_KEPT] = True


def read(graph: Graph, fqn_of: FqnOf) -> Reading:
    """Read a graph as a program.

    Args:
        graph: with the values of nodes in ``meta["val"]``; dead code eliminated.
        fqn_of: FQN of the parameter that a start node gathers or reduces, or None for a
            collective that is not data parallelism's.

    Raises:
        ProgramError: the graph breaks a rule, as by using a result before its wait.
    """
    note_values(graph)
    reader = _Reader(fqn_of)
    for node in graph.nodes:
        reader.read(node)
    return reader.result()


def mark_units(reading: Reading, modules: Collection[str]) -> Reading:
    """Note on each node of a graph which of :mod:`inductor_passes.adapters.units` it is in.

    Args:
        reading: of the graph, in the order in which it was made.
        modules: that are repeated.
    """
    part = parts_of(modules)

    def part_of(op: str) -> Part | None:
        path = _torch.module_path(reading.nodes[op][0])
        return None if path is None else part(path)

    heavy = [op for op, nodes in reading.nodes.items() if _torch.multiplies_matrices(nodes[0])]
    pieces = pieces_of(reading.program, part_of, heavy)
    program = in_units(reading.program, pieces)
    for place, op in enumerate(program.ops):
        for node in reading.nodes[op.name]:
            node.meta[_UNIT] = _Mark(op.unit, place, pieces.get(op.name))
    return Reading(program, reading.nodes)


class _Mark(NamedTuple):
    unit: int
    place: int
    piece: Piece | None


def piece_of(node: Node) -> Piece | None:
    """The piece of a layer that a node was marked with; None for none."""
    mark: _Mark | None = node.meta.get(_UNIT)
    return None if mark is None else mark.piece


def place_of(node: Node) -> int | None:
    """Where a node stood in the graph when it was marked; None if it was made later."""
    mark: _Mark | None = node.meta.get(_UNIT)
    return None if mark is None else mark.place


class _Reader:
    def __init__(self, fqn_of: FqnOf) -> None:
        self.fqn_of = fqn_of
        self.ops: list[Op] = []
        self.nodes: dict[str, tuple[Node, ...]] = {}
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str] = []
        self.resident: set[str] = set()
        self.outputs: list[str] = []
        self.written_inputs: list[str] = []
        self.pending: set[str] = set()
        self.absorbed: set[Node] = set()

    def result(self) -> Reading:
        program = Program(
            tuple(self.ops),
            self.buffers,
            tuple(self.inputs),
            frozenset(self.resident),
            # An input that the graph writes to must exist when the graph ends, so is not freed.
            tuple(dict.fromkeys((*self.outputs, *self.written_inputs))),
        )
        return Reading(program.verify(), self.nodes)

    def read(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.buffers[node.name] = _buffer(node)
            self.inputs.append(node.name)
            self.resident |= {node.name} if node.meta.get(_KEPT) else set()
        elif node.op == "output":
            self.outputs = list(dict.fromkeys(n.name for n in node.all_input_nodes))
        elif node not in self.absorbed:
            self._op(node)

    def _op(self, node: Node) -> None:
        reads = tuple(n.name for n in node.all_input_nodes)
        if _torch.is_collective_start(node) and (results := _results_to_wait_for(node)):
            self._start(node, reads, results)
        elif _torch.is_wait(node):
            self._wait(node, reads)
        elif is_size(node):
            self.buffers[node.name] = Buffer(node.name, 0)
            self._add(node, "view", reads, (node.name,))
        elif _torch.is_view(node) or _torch.is_pure_python(node):
            self._add(node, "view", reads, self._alias(node))
        else:
            self.buffers[node.name] = _buffer(node)
            self._add(node, "compute", reads, (node.name, *self._side_effects(node)))

    def _start(self, node: Node, reads: tuple[str, ...], results: tuple[Node, ...]) -> None:
        out = by_name(call_of(node)).get("out")
        for result in results:
            storage = self.buffers[out.name].storage if isinstance(out, Node) else ""
            self.buffers[result.name] = _buffer(result, storage)
        self.pending.update(result.name for result in results)
        items = tuple(n for n in results if n is not node)
        self.absorbed.update(items)
        collective = collective_of(node, self.fqn_of)
        self._add(node, "start", reads, tuple(n.name for n in results), collective, items)
        if collective.kind == "gather":
            self._keep_shards(node)

    def _wait(self, node: Node, reads: tuple[str, ...]) -> None:
        kind: Kind = "wait" if reads[0] in self.pending else "view"
        items = tuple(n for n in node.users if n.target is operator.getitem)
        if node.target is _torch.WAIT or len(items) < len(node.users):
            self._add(node, kind, reads, self._alias(node))
            return
        waited: Any = node.args[0]
        for item in items:  # of a list, each on the storage of what was waited for
            was = self.buffers[waited[item.args[1]].name]
            self.buffers[item.name] = _buffer(item, was.storage)
        self.absorbed.update(items)
        self._add(node, kind, reads, tuple(item.name for item in items), items=items)

    def _add(
        self,
        node: Node,
        kind: Kind,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        collective: Collective | None = None,
        items: tuple[Node, ...] = (),
    ) -> None:
        unit = node.meta[_UNIT].unit if _UNIT in node.meta and kind == "compute" else 0
        self.ops.append(Op(node.name, kind, reads, writes, collective, unit))
        self.nodes[node.name] = (node, *items)

    def _keep_shards(self, start: Node) -> None:
        """Inputs that are gathered are parameters, which the caller keeps."""
        stack = list(start.all_input_nodes)
        while stack:
            node = stack.pop()
            if node.op == "placeholder":
                self.resident.add(node.name)
            stack += node.all_input_nodes

    def _alias(self, node: Node) -> tuple[str, ...]:
        first = next(iter(node.all_input_nodes), None)
        storage = self.buffers[first.name].storage if first is not None else ""
        self.buffers[node.name] = _buffer(node, storage)
        return (node.name,)

    def _side_effects(self, node: Node) -> tuple[str, ...]:
        state = [_RANDOM] if _torch.is_random(node) else []
        if not has_schema(call_of(node)) or _torch.is_collective_start(node):
            state.append(_EFFECTS)
        for name in state:
            if name not in self.buffers:
                self.buffers[name] = Buffer(name, 0)
                self.inputs.append(name)
        mutated = _torch.mutated_arguments(node)
        self.written_inputs += [
            n.name for n in mutated if n.op == "placeholder" and not n.meta.get(_KEPT)
        ]
        return (*dict.fromkeys(n.name for n in mutated), *state)


def collective_of(start: Node, fqn_of: FqnOf) -> Collective:
    """What a start node sends, for the parameters in its mark; if it has none, for the one that
    ``fqn_of`` gives."""
    found = start.meta.get(_MARK)
    fqn = None if found else fqn_of(start)
    bucket, fqns, window = found or BucketMark("", (fqn,) if fqn else ())
    does = KIND_OF.get(start.target, "other")
    kind = does if fqns else "other"
    sent = [start] if does == "gather" else start.all_input_nodes
    dtypes = dict.fromkeys(str(t.dtype) for node in sent for t in results_of(node))
    arguments = by_name(call_of(start))
    group = str(arguments.get("group_name", ""))
    return Collective(
        kind,
        group,
        # The number of ranks is no argument of an all-reduce.
        int(arguments.get("group_size", 0)) or len(_torch.ranks_of_group(group) or ()),
        sum(map(nbytes_of, sent)),
        "+".join(dtype.removeprefix("torch.") for dtype in dtypes),
        str(arguments.get("reduce_op", "")),
        fqns,
        bucket,
        window,
        max(1, len(results_of(start))),
    )


def _results_to_wait_for(start: Node) -> tuple[Node, ...]:
    """The tensors that a start fills, if each is waited for and used in no other way; else none.

    One wait may be for results of several starts; then this holds for all of these starts or none.
    """
    together, left = {start}, [start]
    while left:
        results = _waited_once(left.pop())
        if not results:
            return ()
        for wait in {user for node in results for user in node.users}:
            taken_apart = all(user.target is operator.getitem for user in wait.users)
            if wait.target is not _torch.WAIT and not taken_apart:
                return ()
            for node in wait.all_input_nodes:
                source = node.all_input_nodes[0] if node.target is operator.getitem else node
                if source not in together:
                    together.add(source)
                    left.append(source)
    return _waited_once(start)


def _waited_once(start: Node) -> tuple[Node, ...]:
    returns_list = isinstance(start.meta.get("val"), (list, tuple))
    results = tuple(start.users) if returns_list else (start,)
    if not _torch.is_collective_start(start):
        return ()
    if returns_list and any(user.target is not operator.getitem for user in results):
        return ()
    users = [list(node.users) for node in results]
    waited = all(len(found) == 1 and _torch.is_wait(found[0]) for found in users)
    return results if waited else ()


def _buffer(node: Node, storage: str = "") -> Buffer:
    itemsize = max((v.element_size() for v in results_of(node)), default=1)
    return Buffer(node.name, nbytes_of(node), storage, itemsize)


def write_order(graph: Graph, reading: Reading, order: Sequence[str]) -> None:
    """Put the nodes of ``graph`` in the order of the named ops."""
    place(graph, [node for name in order for node in reading.nodes[name]])


def place(graph: Graph, nodes: Sequence[Node]) -> None:
    """Move ``nodes``, which are all but the inputs and the output, into the given order."""
    output = graph.output_node()
    for node in nodes:
        output.prepend(node)
