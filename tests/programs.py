"""Programs to test the passes' core on: random ones, and layers as a training step has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from inductor_passes.ir.program import Buffer, Collective, CollectiveKind, Kind, Op, Program
from inductor_passes.machine.cost import LinearCost

# Easy to add up by hand: a compute op takes 10 us, a collective 1 us per byte.
ROUND_COST = LinearCost(latency_us=0, link_gb_s=1e-3, memory_gb_s=float("inf"), launch_us=10)
GROUPS = {"dp": 4, "rep": 2, "tp": 8}
DTYPES = ("f32", "f32", "f32", "bf16")


def random_program(seed: int, n: int) -> Program:
    """A valid program of about ``n`` ops, and the waits and divides that those still lack."""
    return _Builder(random.Random(seed)).build(n)


class _Builder:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ops: list[Op] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str] = []
        self.resident: list[str] = []
        self.outputs: list[str] = []
        self.values: list[str] = []  # what a compute op may read
        self.pending: list[tuple[CollectiveKind, str]] = []
        self.busy: dict[str, tuple[str, ...]] = {}  # storages under each pending buffer

    def build(self, n: int) -> Program:
        self.values += [self._input() for _ in range(2)]
        steps = {
            self._compute: 5,
            self._view: 2,
            self._gather: 4,
            self._reduce: 2,
            self._all_reduce: 1,
            self._other: 1,
            self._mutate: 1,
            self._wait: 5,
        }
        while len(self.ops) < n:
            self.rng.choices(list(steps), list(steps.values()))[0]()
        while self.pending:
            self._wait()
        self.outputs += self.rng.sample(self.values, 2)
        return Program(
            tuple(self.ops),
            self.buffers,
            tuple(self.inputs),
            frozenset(self.resident),
            tuple(dict.fromkeys(self.outputs)),
        ).verify()

    def _input(self) -> str:
        self.inputs.append(self._buffer())
        return self.inputs[-1]

    def _buffer(self, like: str = "") -> str:
        name = f"b{len(self.buffers)}"
        source = self.buffers[like] if like else None
        nbytes = source.nbytes if source else 8 * self.rng.randint(1, 16)
        self.buffers[name] = Buffer(name, nbytes, source.storage if source else name)
        return name

    def _op(
        self,
        kind: Kind,
        reads: Sequence[str],
        writes: Sequence[str],
        collective: Collective | None = None,
    ) -> None:
        self.ops.append(Op(f"o{len(self.ops)}", kind, tuple(reads), tuple(writes), collective))

    def _compute(self) -> None:
        recent = self.values[-4:]
        reads = self.rng.sample(recent, self.rng.randint(1, min(3, len(recent))))
        if self.rng.random() < 0.3:
            reads.append(self.rng.choice(self.values))
        writes = [self._buffer() for _ in range(self.rng.choice((1, 1, 1, 2)))]
        self._op("compute", dict.fromkeys(reads), writes)
        self.values += writes

    def _view(self) -> None:
        source = self.rng.choice(self.values)
        self.values.append(self._buffer(like=source))
        self._op("view", [source], self.values[-1:])

    def _mutate(self) -> None:
        """In place, under the name of a buffer or of a view of it, but in nobody's transfer."""
        busy = {storage for storages in self.busy.values() for storage in storages}
        free = [n for n in self.values if self.buffers[n].storage not in busy]
        if free:
            target = self.rng.choice(free)
            self._op("compute", [self.rng.choice(self.values)], [target])

    def _gather(self) -> None:
        if not self.resident or self.rng.random() < 0.8:
            self.resident.append(self._input())
        source = self.rng.choice(self.resident[-2:])
        fqn = f"m{self.resident.index(source)}.weight"
        if self.rng.random() < 0.2:  # of something that is computed first
            source = self.rng.choice(self.values)
        if self.rng.random() < 0.3:
            view = self._buffer(like=source)
            self._op("view", [source], [view])
            source = view
        if self.rng.random() < 0.3:
            cast = self._buffer()
            self._op("compute", [source], [cast])
            source = cast
        self._start("gather", [source], fqn)

    def _reduce(self) -> None:
        self._start("reduce", [self.rng.choice(self.values[-3:])], f"m{len(self.ops)}.weight")

    def _all_reduce(self) -> None:
        self._start("all_reduce", [self.rng.choice(self.values[-3:])], f"m{len(self.ops)}.weight")

    def _other(self) -> None:
        self._start("other", self.rng.sample(self.values, self.rng.randint(1, 2)), "")

    def _start(self, kind: CollectiveKind, reads: Sequence[str], fqn: str) -> None:
        group = self.rng.choice(("rep", "tp") if kind in ("all_reduce", "other") else ("dp", "tp"))
        nbytes = 8 * self.rng.randint(1, 16)
        op = "" if kind in ("gather", "other") else self.rng.choice(("sum", "avg"))
        fqns = (fqn,) if fqn else ()
        dtype = self.rng.choice(DTYPES)
        collective = Collective(kind, group, GROUPS[group], nbytes, dtype, op, fqns)
        full = self._buffer()
        self._op("start", reads, [full], collective)
        self.pending.append((kind, full))
        self.busy[full] = (full, *(self.buffers[n].storage for n in reads))

    def _wait(self) -> None:
        if not self.pending:
            return
        chosen = self.rng.sample(
            self.pending, self.rng.choice((1, 1, 1, min(2, len(self.pending))))
        )
        for kind, full in chosen:
            self.pending.remove((kind, full))
            del self.busy[full]
        arrived = [self._buffer(like=full) for _, full in chosen]
        self._op("wait", [full for _, full in chosen], arrived)
        for (kind, _), name in zip(chosen, arrived, strict=True):
            if kind in ("gather", "other") or self.rng.random() < 0.5:
                self.values.append(name)
            else:
                self.outputs.append(self._buffer())
                self._op("compute", [name], self.outputs[-1:])


def layers(n: int, part: str) -> str:
    """Text of the ``"forward"`` or ``"backward"`` of ``n`` linear layers, as it comes: exposed."""
    return {"forward": _forward, "backward": _backward}[part](n)


def _forward(n: int) -> str:
    lines = ["input h0: 64", *(f"resident p{k}: 16" for k in range(n))]
    for k in range(n):
        lines += [*_gathered(k), f"compute mm{k}(h{k}, t{k}) -> h{k + 1}: 64"]
    return "\n".join([*lines, *(f"output h{k + 1}" for k in range(n))])


def _backward(n: int) -> str:
    lines = [f"input d{n}: 64"]
    lines += [line for k in range(n) for line in (f"input h{k}: 64", f"resident p{k}: 16")]
    for k in reversed(range(n)):
        lines += [
            *_gathered(k),
            f"compute dgrad{k}(d{k + 1}, t{k}) -> d{k}: 64",
            f"compute wgrad{k}(d{k + 1}, h{k}) -> full_grad{k}: 64",
            f"start r{k}(full_grad{k}) -> part{k}: 16 | reduce group=dp ranks=4 nbytes=64 "
            f"dtype=f32 op=sum fqns=layers.{k}.weight",
            f"wait rw{k}(part{k}) -> shard_grad{k}: 16 @part{k}",
            f"compute divide{k}(shard_grad{k}) -> grad{k}: 16",
        ]
    return "\n".join([*lines, *(f"output grad{k}" for k in range(n)), "output d0"])


def _gathered(k: int) -> list[str]:
    return [
        f"start g{k}(p{k}) -> full{k}: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 "
        f"fqns=layers.{k}.weight",
        f"wait w{k}(full{k}) -> weight{k}: 64 @full{k}",
        f"view v{k}(weight{k}) -> t{k}: 64 @full{k}",
    ]


def renamed(program: Program, new: Callable[[str], str]) -> Program:
    """``program`` with other names for ops, buffers and groups."""

    def collective(c: Collective | None) -> Collective | None:
        return replace(c, group=new(c.group)) if c else None

    def op(o: Op) -> Op:
        reads, writes = tuple(map(new, o.reads)), tuple(map(new, o.writes))
        return Op(new(o.name), o.kind, reads, writes, collective(o.collective))

    buffers = [Buffer(new(b.name), b.nbytes, new(b.storage)) for b in program.buffers.values()]
    return Program(
        tuple(map(op, program.ops)),
        {b.name: b for b in buffers},
        tuple(map(new, program.inputs)),
        frozenset(map(new, program.resident)),
        tuple(map(new, program.outputs)),
    )


def ancestors(program: Program, of: set[int]) -> set[int]:
    """Positions of the ops in ``of`` and of all they need."""
    found = set(of)
    for i in reversed(range(len(program.ops))):
        if i in found:
            found.update(program.predecessors[i])
    return found


def descendants(program: Program, of: set[int]) -> set[int]:
    """Positions of the ops in ``of`` and of all that needs them."""
    found = set(of)
    for i, before in enumerate(program.predecessors):
        if found.intersection(before):
            found.add(i)
    return found
