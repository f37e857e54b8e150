"""Plans by parts of modules: the buckets of a plan by module, each in a few of about equal size.

They take less memory for more launches. Where a model has many large layers, such a plan is what a
search would end at, and it need not look for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.ir.buckets import parts_of
from inductor_passes.ir.program import Bucket, Program
from inductor_passes.planner.segments import even


def in_parts(program: Program, buckets: Sequence[Bucket], n: int) -> list[Bucket]:
    """``buckets``, each in up to ``n`` runs of its members of about as many bytes. A window still
    counts buckets, and so a part of the bytes."""
    nbytes = {op.name: op.collective.nbytes for _, op in program.starts() if op.collective}
    taken = {bucket.label for bucket in buckets}
    found: list[Bucket] = []
    for bucket in buckets:
        of_members = [nbytes[start] for start in bucket.starts]
        runs = even(range(len(of_members)), n, of_members)
        found += parts_of(bucket, [tuple(bucket.starts[i] for i in run) for run in runs], taken)
    return found
