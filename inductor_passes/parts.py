"""Buckets by module in smaller parts: plans for a memory that has no room for whole modules.

Where one block is much like the next, a regular plan is about as good as the best, and takes no
search. What memory a plan by module takes beyond the least is the gathered parameters and the
gradients of the modules that are in flight; parts of a module in flight take less, and reduces that
are waited for where the second next gather is used leave none for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inductor_passes.program import Bucket, Collective, Program

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
            sent = _sent(program, bucket)
            if sent[0].kind == "gather":
                found += _parts(bucket, sent, gathers, window)
            elif sent[0].kind == "reduce":
                found += _parts(bucket, sent, reduces, REDUCE_WINDOW)
            else:
                found.append(bucket)
        if found not in seen:
            seen.append(found)
    return seen


def _sent(program: Program, bucket: Bucket) -> list[Collective]:
    collectives = (program.ops[program.index[name]].collective for name in bucket.starts)
    return [c for c in collectives if c is not None]


def _parts(bucket: Bucket, sent: Sequence[Collective], n: int, window: int) -> Iterator[Bucket]:
    """``bucket``, of which each start sends one of ``sent``, in up to ``n`` parts of about as many
    bytes."""
    nbytes = sum(c.nbytes for c in sent)
    members: list[list[str]] = [[]]
    before = 0
    for name, c in zip(bucket.starts, sent, strict=True):
        if members[-1] and len(members) < n and before + c.nbytes / 2 >= nbytes * len(members) / n:
            members.append([])
        members[-1].append(name)
        before += c.nbytes
    for i, names in enumerate(members):
        label = f"{bucket.label}/{i}" if len(members) > 1 else bucket.label
        yield Bucket(label, tuple(names), window)
