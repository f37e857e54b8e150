"""Plans like that by module: in parts, joined, or waited for at other places, where it falls short.

Where one block is much like the next, a regular plan is about as good as the best, and takes no
search.

Where memory has no room for whole modules (:func:`in_parts`): what a plan by module takes beyond
the least is the gathered parameters and the gradients of the modules that are in flight; parts of a
module in flight take less, and reduces that are waited for where the second next gather is used
leave none for long.

Where the wire is as busy as compute (:func:`joined`): larger transfers take less of it.

Where an all-reduce sends on what was reduced, in hybrid sharding (:func:`sent_on`): it can start no
sooner than that is waited for, so a reduce is waited for where the next one starts. What the last
modules send on is left at the end, where nothing hides it; parts of them can go sooner.
"""

from __future__ import annotations

from collections import defaultdict
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
# How many modules are the last ones, and parts of their reduces and all-reduces: the best of all
# with up to 3, 9 and 3 for Llama 3 8B on 64 B200 (benchmarks/LOG.md) after the simplest.
ENDS = ((0, 1, 1), (3, 3, 2))
# Modules of a bucket of gathers and of one of reduces: the best of all with up to eight for Llama 3
# 70B with tensor parallelism on 64 H100 and B200 (benchmarks/LOG.md).
MODULES = ((2, 1), (4, 4))


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


def joined(buckets: Sequence[Bucket], program: Program) -> list[list[Bucket]]:
    """``buckets`` of several modules each, in the order of :data:`MODULES`, but for the first
    gather and the last reduce, which nothing hides."""
    alike: defaultdict[tuple[str, ...], list[Bucket]] = defaultdict(list)
    for bucket in sorted(buckets, key=lambda b: program.index[b.starts[-1]]):
        c = _sent(program, bucket)[0]
        alike[c.kind, c.group, c.reduce_op, c.dtype].append(bucket)
    found = []
    for gathered, reduced in MODULES:
        together: list[Bucket] = []
        for (kind, *_), same in alike.items():
            first = 1 if kind == "gather" else 0
            last = len(same) - 1 if kind == "reduce" else len(same)
            n = {"gather": gathered, "reduce": reduced}.get(kind, 1)
            runs = [same[i : min(i + n, last)] for i in range(first, last, n)]
            together += [*same[:first], *map(_join, runs), *same[last:]]
        found.append(together)
    return found


def _join(buckets: Sequence[Bucket]) -> Bucket:
    label = "+".join(bucket.label for bucket in buckets)
    return Bucket(label, tuple(name for b in buckets for name in b.starts), buckets[0].window)


def sent_on(buckets: Sequence[Bucket], program: Program) -> list[list[Bucket]]:
    """``buckets`` with reduces waited for early, in the order of :data:`ENDS`; none if there are no
    all-reduces to send on what is reduced."""
    kinds = [_sent(program, bucket)[0].kind for bucket in buckets]
    if not {"reduce", "all_reduce"} <= set(kinds):
        return []
    order = sorted(range(len(buckets)), key=lambda i: program.index[buckets[i].starts[-1]])
    reduces, all_reduces = ([i for i in order if kinds[i] == k] for k in ("reduce", "all_reduce"))
    found = []
    for last, parts, parts_sent_on in ENDS:
        parts_of = dict.fromkeys(reduces, 1)
        parts_of |= dict.fromkeys(reduces[len(reduces) - last :], parts)
        parts_of |= dict.fromkeys(all_reduces[len(all_reduces) - last :], parts_sent_on)
        found.append(
            [
                part
                for i, bucket in enumerate(buckets)
                for part in _parts(
                    bucket,
                    _sent(program, bucket),
                    parts_of.get(i, 1),
                    1 if kinds[i] == "reduce" else bucket.window,
                )
            ]
        )
    return found


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
