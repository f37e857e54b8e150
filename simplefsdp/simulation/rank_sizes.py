"""Sizes of shards as formulas of the number of ranks.

A graph is traced for one number of ranks. For another number of ranks, shards have another number
of rows and collectives another size; all else is the same. This holds if the rows of each parameter
divide evenly among the ranks in both cases, or in neither, in which case shards are padded. Of a
parameter that is sharded along another dimension than its first, rows are copied to the front,
unless a shard is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import sympy

from inductor_passes.ir.program import Collective, Op, Program
from inductor_passes.ir.sizes import Size


def with_ranks(
    program: Program,
    ranks_of: Mapping[str, sympy.Expr],
    rows_of: Mapping[str, int],
    moved: Set[str] = frozenset(),
) -> tuple[Program, set[sympy.Basic]]:
    """A program with formulas for the sizes of its shards and collectives; and the conditions on
    the number of ranks under which these formulas hold.

    Args:
        program: a graph, as it was read.
        ranks_of: for each process group of variable size, by name: its number of ranks, a formula.
        rows_of: by FQN, the full parameter's size of the dimension that is sharded.
        moved: FQNs of those of which that is not the first dimension.
    """
    spread = _Spread(program, ranks_of, rows_of, moved)
    ops = tuple(spread.op(op) for op in program.ops)
    return replace(program, ops=ops, buffers=spread.buffers), spread.holds


@dataclass(frozen=True)
class _Rows:
    """Rows of a parameter's shard, and of all its shards with padding, as formulas."""

    fqn: str
    shard: Size
    padded: int


def _formula(nbytes: int, rows: int) -> int:
    """The size ``nbytes``, of ``rows`` rows, as a formula in the number of rows."""
    return nbytes // int(rows) * rows


class _Spread:
    def __init__(
        self,
        program: Program,
        ranks_of: Mapping[str, sympy.Expr],
        rows_of: Mapping[str, int],
        moved: Set[str],
    ) -> None:
        self.program, self.ranks_of, self.rows_of = program, ranks_of, rows_of
        self.moved = moved
        self.buffers = dict(program.buffers)
        self.shards: dict[str, _Rows] = {}
        self.holds: set[sympy.Basic] = set()
        self.aliases: dict[str, list[str]] = {}
        for name, buffer in program.buffers.items():
            self.aliases.setdefault(buffer.storage, []).append(name)

    def op(self, op: Op) -> Op:
        c = op.collective
        if c is None or c.group not in self.ranks_of:
            self._follow(op)
            return op
        rows = self._rows(c)
        nbytes = c.nbytes
        if rows is not None and c.kind == "gather":
            self._prepared(op, rows)
            self._pad(op.writes, rows)
            nbytes = _formula(nbytes, rows.padded)
        elif rows is not None and c.kind == "reduce":
            self._pad(op.reads, rows)
            self._shard(op.writes, rows)
            nbytes = _formula(nbytes, rows.padded)
        elif c.kind == "all_reduce":
            self._follow(op)
            nbytes = sum(self.buffers[name].nbytes for name in op.reads)
        ranks = Size(c.ranks, self.ranks_of[c.group])
        return replace(op, collective=replace(c, nbytes=nbytes, ranks=ranks))

    def _rows(self, c: Collective) -> _Rows | None:
        """The rows of the parameter that a collective carries; None if it is not sharded."""
        rows = self.rows_of.get(c.fqns[0], 0) if len(c.fqns) == 1 else 0
        if not rows or c.kind not in ("gather", "reduce"):
            return None
        ranks = self.ranks_of[c.group]
        rest = sympy.Mod(rows, ranks)
        if c.fqns[0] in self.moved:
            is_one, each = -(-rows // c.ranks) == 1, sympy.ceiling(rows / ranks)
            self.holds.add(sympy.Eq(each, 1) if is_one else sympy.Gt(each, 1))
        if rows % c.ranks == 0:
            self.holds.add(sympy.Eq(rest, 0))
            return _Rows(c.fqns[0], Size(rows // c.ranks, rows / ranks), rows)
        self.holds.add(sympy.Ne(rest, 0))
        each = -(-rows // c.ranks)
        formula = sympy.ceiling(rows / ranks)
        return _Rows(c.fqns[0], Size(each, formula), Size(each * c.ranks, formula * ranks))

    def _prepared(self, gather: Op, rows: _Rows) -> None:
        """Resize the buffers that a gather sends, and the buffers that they were computed from."""
        names = list(gather.reads)
        while names:
            name = names.pop()
            if name not in self.shards:
                self._shard([name], rows)
                at = self.program.writer.get(name)
                names += self.program.ops[at].reads if at is not None else ()

    def _shard(self, names: Iterable[str], rows: _Rows) -> None:
        """Resize those buffers that consist of whole rows of a shard. Others, such as a scale, have
        the same size on any number of ranks."""
        for name in names:
            buffer = self.program.buffers[name]
            if buffer.nbytes and buffer.nbytes % (int(rows.shard) * buffer.itemsize) == 0:
                self.shards[name] = rows
                self._resize(name, _formula(buffer.nbytes, rows.shard))

    def _pad(self, names: Sequence[str], rows: _Rows) -> None:
        """Resize full parameters or gradients with their padding, and the aliases of the same size;
        an alias of another size is a slice without the padding."""
        for buffer in (self.program.buffers[name] for name in names):
            for alias in self.aliases[buffer.storage]:
                if self.program.buffers[alias].nbytes == buffer.nbytes:
                    self._resize(alias, _formula(buffer.nbytes, rows.padded))

    def _follow(self, op: Op) -> None:
        """Resize the results of an op that reads shards of one parameter, and nothing else."""
        read = [name for name in op.reads if self.program.buffers[name].nbytes]
        found = {self.shards[name].fqn for name in read if name in self.shards}
        if len(found) == 1 and all(name in self.shards for name in read):
            self._shard(op.writes, self.shards[read[0]])

    def _resize(self, name: str, nbytes: int) -> None:
        self.buffers[name] = replace(self.buffers[name], nbytes=nbytes)
