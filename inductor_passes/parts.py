"""Buckets by module in smaller parts: plans for a memory that has no room for whole modules.

Where one block is much like the next, a regular plan is about as good as the best, and takes no
search. What memory a plan by module takes beyond the least is the gathered parameters and the
gradients of the modules that are in flight; parts of a module in flight take less, and reduces that
are waited for where the second next gather is used leave none for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inductor_passes.program import Bucket, Program

# Parts of a bucket of gathers and of one of reduces, and the window of gathers: the best for their
# memory of all with up to four parts and windows up to three, for Llama 3 405B on 512 H100
# (benchmarks/LOG.md). First the one that hides most for least memory, which is often the last that
# is looked at; then by memory, most first.
SHAPES = (
    (3, 2, 3),
    (1, 1, 2),
    (2, 1, 3),
    (1, 2, 2),
    (3, 1, 3),
    (2, 2, 3),
    (3, 2, 2),
    (4, 2, 3),
)
REDUCE_WINDOW = -2


def in_parts(buckets: Sequence[Bucket], program: Program) -> list[list[Bucket]]:
    """``buckets`` in parts, in the order of :data:`SHAPES`."""
    seen: list[list[Bucket]] = []
    for gathers, reduces, window in SHAPES:
        found: list[Bucket] = []
        for bucket in buckets:
            kind = _kind(program, bucket)
            if kind == "gather":
                found += _parts(bucket, program, gathers, window)
            elif kind == "reduce":
                found += _parts(bucket, program, reduces, REDUCE_WINDOW)
            else:
                found.append(bucket)
        if found not in seen:
            seen.append(found)
    return seen


def _kind(program: Program, bucket: Bucket) -> str:
    collective = program.ops[program.index[bucket.starts[0]]].collective
    return collective.kind if collective is not None else "other"


def _parts(bucket: Bucket, program: Program, n: int, window: int) -> Iterator[Bucket]:
    """``bucket`` in up to ``n`` parts of about as many bytes."""
    collectives = [program.ops[program.index[name]].collective for name in bucket.starts]
    nbytes = [c.nbytes if c is not None else 0 for c in collectives]
    members: list[list[str]] = [[]]
    before = 0
    for name, size in zip(bucket.starts, nbytes, strict=True):
        if members[-1] and len(members) < n and before + size / 2 >= sum(nbytes) * len(members) / n:
            members.append([])
        members[-1].append(name)
        before += size
    for i, names in enumerate(members):
        label = f"{bucket.label}/{i}" if len(members) > 1 else bucket.label
        yield Bucket(label, tuple(names), window)
