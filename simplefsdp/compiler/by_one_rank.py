"""Ranks of one machine that need the same code: one of them compiles it, and the others load it.

Else as many compilers would run at once as there are ranks, all doing the same, on the cores of
one machine. The first of the ranks that need the same code compiles forward and backward, and
leaves the code where a later process would find it (``warm_start.py``). Then all ranks go through
what they would have agreed on, had all compiled. If one of them has no code in the end, none uses
what was made: all compile, each for itself, and what fails then fails as ever.

On the CPU only: code for a GPU names the device, which is another one on each rank of a machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from simplefsdp import _torch, rank_guard
from simplefsdp.compiler.observed import agree_again
from simplefsdp.compiler.plans import Compilation
from simplefsdp.compiler.warm_start import WarmStart
from simplefsdp.rank_logging import say
from simplefsdp.rank_work import RankWork

Code = Callable[..., Any]

log = logging.getLogger("simplefsdp")


def by_one_rank(
    compilation: Compilation, warm: WarmStart, compile_for: Callable[[Compilation], Code]
) -> Code | None:
    """The code of a graph, compiled by one rank for all that need the same. None if no two ranks
    do, or if it was of no use to one of them: then compile. All ranks call this, or none.

    Args:
        compilation: of this rank, together with all.
        warm: its file.
        compile_for: compiles in the company of the ranks that it is told, and calls
            :meth:`~simplefsdp.compiler.warm_start.WarmStart.accept`.
    """
    ranks, timeout_s, me = compilation.ranks, compilation.timeout_s, dist.get_rank()
    what = "whether ranks need the same code"
    number, first_of = rank_guard.first_with_the_same(what, warm.place, ranks, timeout_s)
    compiling = tuple(dict.fromkeys(first_of))
    if len(compiling) == len(ranks):
        return None
    say("%d of %d ranks compile for all", len(compiling), len(ranks))
    worker = first_of[ranks.index(me)]
    work = RankWork(f"the code that rank {worker} makes", number, ranks, worker, timeout_s)
    if worker == me:
        _leave_code(compilation._replace(ranks=compiling), warm, compile_for, work)
    # The worker, too, or it would run code that nobody else has.
    found = warm.loaded() if worker == me or work.wait() else None
    what = "whether each rank has the code that one has made"
    answer = "it has none" if found is None else "it has"
    if not rank_guard.have_the_same(what, answer, ranks, timeout_s) or found is None:
        return None
    observed, code = found
    for is_backward, one in observed.items():
        said = "" if worker == me else one.said
        agree_again(one._replace(said=said), is_backward, compilation)
    return code


def _leave_code(
    compilation: Compilation,
    warm: WarmStart,
    compile_for: Callable[[Compilation], Code],
    work: RankWork,
) -> None:
    """Compile for others, in the company of those who do likewise."""
    succeeded = False
    try:
        with _torch.backward_compiled_at_once(), warm.telling(work.step):
            compile_for(compilation)
        succeeded = True
    except Exception as error:  # all will meet it, and tell of it, if it has not to do with this
        log.debug("the code for other ranks was not made: %r", error)
    work.end(succeeded=succeeded)
