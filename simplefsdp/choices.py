"""The words that options accept, in code and on the command line. This file imports no torch."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, get_args

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]
MODES: tuple[Mode, ...] = get_args(Mode)
Bucketing = Literal["none", "manual", "auto"]
Executor = Literal["auto", "inductor", "regions", "aot_eager"]
EXECUTORS: tuple[Executor, ...] = get_args(Executor)


def with_default(args: Sequence[str], flag: str, word: str) -> list[str]:
    """``args``, with ``word`` as the value of each ``flag`` that is given without one."""
    found: list[str] = []
    for arg, following in zip_longest(args, args[1:], fillvalue="--"):
        found += [flag, word] if arg == flag and following.startswith("--") else [arg]
    return found
