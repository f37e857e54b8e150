"""Makes all ranks fail if one fails at what all of them do, so that none waits for ever."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from simplefsdp import rank_guard

# Disks differ in speed, and rank 0 may write while the others wait.
TIMEOUT_S = 3600.0


@contextmanager
def together(what: str, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Wait at the end of the block until all ``ranks`` have come to its end.

    Gives a list, to which the block may add lines that must be equal on all ranks.

    Raises:
        RankMismatchError: on the ranks that did not fail, if another rank did or has other lines.
            The rank that failed raises its own error.
    """
    lines = ["came to its end"]
    try:
        yield lines
    except Exception as error:
        first = str(error).split("\n", maxsplit=1)[0]
        with suppress(rank_guard.RankMismatchError):
            told = [f"failed: {type(error).__name__}: {first}"]
            rank_guard.agree(what, told, ranks, rank_guard.waiting_s(TIMEOUT_S), remember=False)
        raise
    rank_guard.agree(what, lines, ranks, rank_guard.waiting_s(TIMEOUT_S), remember=False)
