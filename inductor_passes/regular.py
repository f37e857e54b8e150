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
from collections.abc import Sequence, Set
from dataclasses import replace

from inductor_passes.buckets import new_label, parts_of
from inductor_passes.merge import bucket_class
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
# How many buckets are the last ones, and parts of their reduces and all-reduces: the simplest, and
# the best of those tried for Llama 3 8B on 64 B200 (benchmarks/LOG.md).
ENDS = ((0, 1, 1), (3, 3, 2))
# Buckets of gathers and of reduces that are joined to one: the best of those tried for Llama 3 70B
# with tensor parallelism on 64 H100 and B200 (benchmarks/LOG.md).
MODULES = ((2, 1), (4, 4))


def in_parts(buckets: Sequence[Bucket], program: Program) -> list[list[Bucket]]:
    """``buckets`` in parts, in the order of :data:`SHAPES`."""
    seen: list[list[Bucket]] = []
    taken = {bucket.label for bucket in buckets}
    for gathers, reduces, window in SHAPES:
        found: list[Bucket] = []
        for bucket in buckets:
            sent = sent_by(bucket, program)
            if sent[0].kind == "gather":
                found += _parts(bucket, sent, gathers, window, taken)
            elif sent[0].kind == "reduce":
                found += _parts(bucket, sent, reduces, REDUCE_WINDOW, taken)
            else:
                found.append(bucket)
        if found not in seen:
            seen.append(found)
    return seen


def joined(buckets: Sequence[Bucket], program: Program, fqns: Sequence[str]) -> list[list[Bucket]]:
    """``buckets`` of gathers and reduces joined, in the order of :data:`MODULES`, but for the first
    gather and the last reduce (of each group and dtype), which nothing hides.

    Members travel in the order of ``fqns``, as in all plans.
    """
    found: list[list[Bucket]] = []
    for gathered, reduced in MODULES:
        together: list[Bucket] = []
        for kind, first, between, last in alike_in_turn(buckets, program):
            n = {"gather": gathered, "reduce": reduced}.get(kind, 1)
            taken = {bucket.label for bucket in buckets}
            together += first
            for i in range(0, len(between), n):
                run = between[i : i + n]
                together.append(join(run, program, fqns, taken) if run[1:] else run[0])
                taken.add(together[-1].label)
            together += last
        if len(together) < len(buckets) and together not in found:
            found.append(together)
    return found


def alike_in_turn(
    buckets: Sequence[Bucket], program: Program
) -> list[tuple[str, list[Bucket], list[Bucket], list[Bucket]]]:
    """Of buckets that may be one, in their turn: their kind, the first gather, what lies between,
    and the last reduce. Nothing hides the ends, so the less there is in them, the better, also
    where costs are not what the model says."""
    alike: defaultdict[tuple[object, ...], list[Bucket]] = defaultdict(list)
    for bucket in sorted(buckets, key=lambda b: turn_of(b, program)):
        alike[bucket_class(sent_by(bucket, program)[0])].append(bucket)
    found = []
    for (kind, *_), same in alike.items():
        first, last = int(kind == "gather"), len(same) - int(kind == "reduce")
        found.append((str(kind), same[:first], same[first:last], same[last:]))
    return found


def turn_of(bucket: Bucket, program: Program) -> int:
    """Where its first gather is due, or its last gradient is ready."""
    places = [program.index[name] for name in bucket.starts]
    return min(places) if sent_by(bucket, program)[0].kind == "gather" else max(places)


def join(
    buckets: Sequence[Bucket], program: Program, fqns: Sequence[str], taken: Set[str]
) -> Bucket:
    """One for ``buckets``, under a label not ``taken``; members travel in the order of ``fqns``."""
    place = {fqn: i for i, fqn in enumerate(fqns)}
    sent = {n: c for b in buckets for n, c in zip(b.starts, sent_by(b, program), strict=True)}

    def at(name: str) -> int:
        return min((place.get(fqn, len(place)) for fqn in sent[name].fqns), default=len(place))

    label = new_label("+".join(bucket.label for bucket in buckets), taken)
    return Bucket(label, tuple(sorted(sent, key=at)), buckets[0].window)


def sent_on(buckets: Sequence[Bucket], program: Program) -> list[list[Bucket]]:
    """``buckets`` with reduces waited for early, in the order of :data:`ENDS`; none if there are no
    all-reduces beside reduces, which send on what is reduced."""
    kinds = [sent_by(bucket, program)[0].kind for bucket in buckets]
    if not {"reduce", "all_reduce"} <= set(kinds):
        return []
    order = sorted(range(len(buckets)), key=lambda i: turn_of(buckets[i], program))
    reduces, all_reduces = ([i for i in order if kinds[i] == k] for k in ("reduce", "all_reduce"))
    found: list[list[Bucket]] = []
    taken = {bucket.label for bucket in buckets}
    for last, parts, parts_sent_on in ENDS:
        parts_of = dict.fromkeys(reduces[max(0, len(reduces) - last) :], parts)
        parts_of |= dict.fromkeys(all_reduces[max(0, len(all_reduces) - last) :], parts_sent_on)
        shape: list[Bucket] = []
        for i, bucket in enumerate(buckets):
            window = 1 if kinds[i] == "reduce" else bucket.window
            shape += _parts(bucket, sent_by(bucket, program), parts_of.get(i, 1), window, taken)
        if shape not in found:
            found.append(shape)
    return found


def sent_by(bucket: Bucket, program: Program) -> list[Collective]:
    """The collectives that are its members."""
    collectives = (program.ops[program.index[name]].collective for name in bucket.starts)
    return [c for c in collectives if c is not None]


def _parts(
    bucket: Bucket, sent: Sequence[Collective], n: int, window: int, taken: Set[str]
) -> list[Bucket]:
    """``bucket``, of which each start sends one of ``sent``, in up to ``n`` parts of about as many
    bytes, under labels that are not ``taken``."""
    nbytes = sum(c.nbytes for c in sent)
    members: list[list[str]] = [[]]
    before = 0
    for name, c in zip(bucket.starts, sent, strict=True):
        if members[-1] and len(members) < n and before + c.nbytes / 2 >= nbytes * len(members) / n:
            members.append([])
        members[-1].append(name)
        before += c.nbytes
    return parts_of(replace(bucket, window=window), members, taken)
