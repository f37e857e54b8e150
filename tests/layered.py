"""Random layered programs, as the parallelisms make them, and all the plans that one can have."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inductor_passes.ir.program import Bucket, Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost

KINDS = ("forward", "backward", "hybrid", "replicate", "mixed", "tensor_parallel")


def layered(seed: int, n: int, kind: str) -> tuple[Program, LinearCost, list[str]]:
    """``n`` linear layers of random sizes and times, their cost model, and the parameters."""
    rng = random.Random(f"{seed} {n} {kind}")
    layer = _forward if kind == "forward" else _backward
    dtypes = ("f32", "bf16") if kind == "mixed" else ("f32",)
    us: dict[str, float] = {}
    blocks = [layer(rng, k, kind, rng.choice(dtypes), us) for k in range(n)]
    if kind != "forward":
        blocks.reverse()
    first = "x0" if kind == "forward" else f"x{n}"
    inputs = [line for inputs, _ in blocks for line in inputs]
    ops = [line for _, ops in blocks for line in ops]
    last = f"output x{n}" if kind == "forward" else "output x0"
    cost = LinearCost(rng.choice((0, 2, 8, 20)), 1e-3 * rng.choice((1, 2, 5, 20)), op_us=us)
    cost = replace(cost, compute_beside=rng.choice((1.0, 1.0, 0.6)))
    cost = replace(cost, member_us=cost.latency_us * rng.choice((0, 0.2, 0.5)))
    program = parse("\n".join([f"input {first}: 32", *inputs, *ops, last]))
    return program, cost, [f"layers.{k}.weight" for k in range(n)]


def _times(rng: random.Random, us: dict[str, float], *names: str) -> None:
    us.update((name, rng.choice((1, 5, 10, 20, 40))) for name in names)


def _gather(k: int, nbytes: int, dtype: str) -> list[str]:
    return [
        f"start g{k}(p{k}) -> full{k}: {nbytes} | gather group=dp ranks=4 nbytes={nbytes} "
        f"dtype={dtype} fqns=layers.{k}.weight",
        f"wait w{k}(full{k}) -> weight{k}: {nbytes} @full{k}",
    ]


def _forward(
    rng: random.Random, k: int, kind: str, dtype: str, us: dict[str, float]
) -> tuple[list[str], list[str]]:
    nbytes = 8 * rng.choice((1, 2, 4, 16))
    _times(rng, us, f"mm{k}")
    matmul = f"compute mm{k}(x{k}, weight{k}) -> x{k + 1}: {8 * rng.randint(1, 8)}"
    kept = [f"output x{k + 1}"] if rng.random() < 0.5 else []
    return [f"resident p{k}: {nbytes // 4}"], [*_gather(k, nbytes, dtype), matmul, *kept]


def _backward(
    rng: random.Random, k: int, kind: str, dtype: str, us: dict[str, float]
) -> tuple[list[str], list[str]]:
    nbytes = 8 * rng.choice((1, 2, 4, 16))
    _times(rng, us, f"dgrad{k}", f"wgrad{k}", f"divide{k}")
    inputs, ops = [f"input h{k}: {8 * rng.randint(1, 8)}"], []
    weight = f"h{k}"
    if kind != "replicate":
        inputs.append(f"resident p{k}: {nbytes // 4}")
        ops, weight = _gather(k, nbytes, dtype), f"weight{k}"
    made = f"d{k}" if kind == "tensor_parallel" else f"x{k}"
    ops.append(f"compute dgrad{k}(x{k + 1}, {weight}) -> {made}: {8 * rng.randint(1, 8)}")
    if kind == "tensor_parallel":
        ops += [
            f"start t{k}(d{k}) -> td{k}: 8 | other group=tp ranks=2 nbytes=8 dtype=bf16",
            f"wait tw{k}(td{k}) -> x{k}: 8 @td{k}",
        ]
    ops.append(f"compute wgrad{k}(x{k + 1}, h{k}) -> full_grad{k}: {nbytes}")
    ops += _all_reduce(k, nbytes) if kind == "replicate" else _reduce(k, nbytes, dtype)
    reduced = f"shard{k}"
    if kind == "hybrid":
        ops += [
            f"start a{k}(shard{k}) -> all{k}: {nbytes // 4} | all_reduce group=rep ranks=2 "
            f"nbytes={nbytes // 4} dtype={dtype} op=sum fqns=layers.{k}.weight",
            f"wait aw{k}(all{k}) -> summed{k}: {nbytes // 4} @all{k}",
        ]
        reduced = f"summed{k}"
    left = nbytes if kind == "replicate" else nbytes // 4
    ops += [f"compute divide{k}({reduced}) -> grad{k}: {left}", f"output grad{k}"]
    return inputs, ops


def _all_reduce(k: int, nbytes: int) -> list[str]:
    return [line.replace("| reduce", "| all_reduce") for line in _reduce(k, 4 * nbytes, "f32")]


def _reduce(k: int, nbytes: int, dtype: str) -> list[str]:
    return [
        f"start r{k}(full_grad{k}) -> part{k}: {nbytes // 4} | reduce group=dp ranks=4 "
        f"nbytes={nbytes} dtype={dtype} op=sum fqns=layers.{k}.weight",
        f"wait rw{k}(part{k}) -> shard{k}: {nbytes // 4} @part{k}",
    ]


def all_plans(program: Program, each: bool) -> Iterator[list[Bucket]]:
    """Every partition of the gathers, and of the reduces, into runs, with windows of 1, 2 and 3,
    and those of reduces that end at the next use of a gather, or at the one after it.

    Windows are those of each bucket if ``each``, else all gathers share one, and all reduces.
    """
    kinds: dict[str, list[str]] = {"gather": [], "reduce": [], "all_reduce": []}
    for _, op in program.starts():
        if op.collective.kind in kinds:
            kinds[op.collective.kind].append(op.name)
    gathers, reduces, all_reduces = kinds.values()
    followed = bool(reduces and all_reduces)
    for some in _sides(program, gathers, each, (1, 2, 3)):
        windows = (1, 2, 3, -1, -2) if gathers and reduces else (1, 2, 3)
        for others in _sides(program, reduces or all_reduces, each, windows):
            then = [
                Bucket(b.label, tuple(name.replace("r", "a") for name in b.starts), 9)
                for b in others
            ]
            yield [*some, *others, *(then if followed else ())]


def _sides(
    program: Program, names: Sequence[str], each: bool, choices: Sequence[int]
) -> list[list[Bucket]]:
    found = []
    for cuts in itertools.product((False, True), repeat=max(0, len(names) - 1)):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(names)]
        runs = [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        runs = [run for run in runs if run]
        for windows in itertools.product(choices, repeat=len(runs) if each else 1):
            pairs = zip(runs, windows * (1 if each else len(runs)), strict=True)
            found.append(
                [bucket for run, window in pairs for bucket in _by_dtype(program, run, window)]
            )
            if not runs:
                break
    return found


def _by_dtype(program: Program, run: Sequence[str], window: int) -> list[Bucket]:
    classes: dict[str, list[str]] = {}
    for name in run:
        classes.setdefault(program.ops[program.index[name]].collective.dtype, []).append(name)
    return [Bucket(run[0], tuple(members), window) for members in classes.values()]
