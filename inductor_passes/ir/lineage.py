"""What stems from which collective, and what a collective stems from."""

from __future__ import annotations

from collections.abc import Mapping

from inductor_passes.ir.program import Program


def reduced_nbytes(program: Program) -> dict[str, int]:
    """Bytes, by storage, of the results of reduces and of what is made of them, for any rank.

    The bytes that a reduce sends are divided equally among its ranks and its results. What is made
    of a result is taken to have as many elements. The sizes of this rank's own shards are not used.
    """
    nbytes: dict[str, int] = {}
    for i, op in enumerate(program.ops):
        c, made = op.collective, program.first_written(i)
        if c is not None and c.kind == "reduce":
            nbytes.update(dict.fromkeys(made, -(-c.nbytes // (c.ranks * max(1, len(made))))))
        elif op.sends in ("", "all_reduce"):
            given = {s: nbytes[s] for s in program.storages(op.reads) if s in nbytes}
            for storage in made - nbytes.keys() if given else ():
                nbytes[storage] = max(
                    n * program.buffers[storage].itemsize // program.buffers[s].itemsize
                    for s, n in given.items()
                )
    return nbytes


def origins(program: Program) -> dict[str, int]:
    """By storage, the position of the reduce that it stems from, if it stems from just one."""
    origin: dict[str, int] = {}
    for i, op in enumerate(program.ops):
        if op.sends == "reduce":
            origin.update(dict.fromkeys(program.storages(op.writes), i))
        elif not op.sends:
            sources = {origin[s] for s in program.storages(op.reads) if s in origin}
            if len(sources) == 1:
                origin.update(dict.fromkeys(program.storages(op.writes), *sources))
    return origin


def following(program: Program, origin: Mapping[str, int]) -> dict[int, int]:
    """By all-reduce whose input stems from just one reduce: that reduce; both as positions."""
    follows: dict[int, int] = {}
    for i, op in enumerate(program.ops):
        sources = {origin[s] for s in program.storages(op.reads) if s in origin}
        if op.sends == "all_reduce" and len(sources) == 1:
            follows[i] = sources.pop()
    return follows


def behind_reduces(program: Program) -> set[int]:
    """Positions of the waits for reduces and all-reduces, and of all ops that depend on them."""
    reduces = (i for i, op in program.starts() if "reduce" in op.sends)
    found = {wait for i in reduces for wait in program.waits_of[i]}
    for i, before in enumerate(program.predecessors):
        if not found.isdisjoint(before):
            found.add(i)
    return found


def dependent(program: Program, follows: Mapping[int, int]) -> set[int]:
    """Positions of gathers whose input depends on another collective, and of reduces and
    all-reduces on whose result another collective depends (an all-reduce that ``follows`` a reduce
    does not count as another collective)."""
    found: set[int] = set()
    made: set[str] = set()
    for i, op in enumerate(program.ops):
        after = not made.isdisjoint(program.storages(op.reads))
        if op.sends == "gather" and after:
            found.add(i)
        if op.sends or after:
            made |= program.storages(op.writes)
    needed: set[str] = set()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        feeds = not needed.isdisjoint(program.storages(op.writes))
        if "reduce" in op.sends and feeds:
            found.update((i, follows.get(i, i)))
        if feeds or (op.sends and i not in follows):
            needed |= program.storages(op.reads)
    return found
