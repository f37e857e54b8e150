"""Ranks of one machine that need the same code: one of them compiles it, and all load it.

Otherwise as many compilers as there are ranks would run at once on the cores of one machine, and
all would make the same code. Instead the lowest rank compiles forward and backward, and saves the
code where a later process would look for it (``warm_start.py``). All ranks load it, and agree on
all that they would have agreed on if each had compiled. If a rank has no code in the end, no rank
uses what was made: each rank compiles for itself, and an error of compiling appears as usual.

This is done on the CPU only: code for a GPU names its device, which differs between the ranks of a
machine. And it is not done where the ranks' code differs: where groups or shards differ, as under
hybrid sharding, where each keeps another part after forward (``post_forward.py``), or where tracing
asks for the rank (``_torch/graph_key.py``).
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
    """The code of a graph for which all ranks need the same code, compiled by the lowest rank. None
    if some rank cannot use that code: then each rank must compile. All ranks call this, or none.

    Args:
        compilation: this rank's; all ranks compile together.
        warm: names the file that all ranks share, and that does not exist yet.
        compile_alone: compiles without asking the other ranks, which do not answer while one rank
            works, and calls :meth:`~simplefsdp.compiler.warm_start.WarmStart.accept`. What all
            ranks must agree on comes afterwards.
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
    """Compile for all ranks, and load the code from the file as the others will, so that this rank
    runs the same code as they do; None if there is no usable file."""
    try:
        with _torch.backward_compiled_at_once():
            compile_alone()
        if (found := warm.loaded()) is None:
            log.debug("all ranks compile, since what one makes cannot be shared")
            warm.share_no_more()
        return found
    except Exception as error:  # one that has nothing to do with sharing comes again on all ranks
        log.warning("all ranks compile, since one could not for all: %r", error)
        return None
