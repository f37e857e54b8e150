"""Ranks of one machine that need the same code: one of them compiles it, and all load it.

Else as many compilers would run at once as there are ranks, all doing the same, on the cores of
one machine. The lowest rank compiles forward and backward, and leaves the code where a later
process would find it (``warm_start.py``). Then all ranks go through what they would have agreed
on, had all compiled. If one of them has no code in the end, none uses what was made: all compile,
each for itself, and what fails then fails as ever.

On the CPU only: code for a GPU names the device, which is another one on each rank of a machine.
Nor where groups or shards differ between ranks, as under hybrid sharding, or tracing asks for the
rank: their code is not the same (``_torch/graph_key.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

from simplefsdp import _torch, rank_guard
from simplefsdp.compiler.plans import Compilation
from simplefsdp.compiler.warm_start import Code, Loaded, WarmStart
from simplefsdp.rank_logging import say
from simplefsdp.rank_work import RankWork

log = logging.getLogger("simplefsdp")


def by_one_rank(
    compilation: Compilation, warm: WarmStart, compile_alone: Callable[[], Code]
) -> Code | None:
    """The code of a graph that all ranks need the same code for, compiled by the lowest; None if it
    was of no use to one of them: then compile. All ranks call this, or none.

    Args:
        compilation: of this rank, together with all.
        warm: its file, which all ranks share, and which is not there.
        compile_alone: compiles in nobody's company, and calls
            :meth:`~simplefsdp.compiler.warm_start.WarmStart.accept`. What all must agree on comes
            afterwards; while one rank works, the others do not answer.
    """
    ranks, timeout_s = compilation.ranks, compilation.timeout_s
    worker = min(ranks)
    is_worker = worker == dist.get_rank()
    say("rank %d compiles for %d ranks, which need the same code", worker, len(ranks))
    work = RankWork(f"the code that rank {worker} makes", warm.shared, ranks, worker, timeout_s)
    if is_worker:
        found = work.do(lambda: _made(warm, compile_alone))
    else:
        found = warm.loaded() if work.wait() else None
    what = "whether each rank has the code that one has made"
    answer = "it has none" if found is None else "it has"
    if not rank_guard.have_the_same(what, answer, ranks, timeout_s) or found is None:
        return None
    return warm.use(found, is_said=is_worker)


def _made(warm: WarmStart, compile_alone: Callable[[], Code]) -> Loaded | None:
    """What a compilation for others has left, as they load it: this rank, too, or it would run code
    that nobody else has; None if it left nothing."""
    try:
        with _torch.backward_compiled_at_once():
            compile_alone()
        if (found := warm.loaded()) is None:
            log.debug("all ranks compile, since what one makes cannot be shared")
            warm.share_no_more()
        return found
    except Exception as error:  # if it has not to do with this, all will meet it, and tell of it
        log.warning("all ranks compile, since one could not for all: %r", error)
        return None
