"""What users choose from by a word, in code and on the command line, which imports no torch."""

from typing import Literal, get_args

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]
MODES: tuple[Mode, ...] = get_args(Mode)
Bucketing = Literal["none", "manual", "auto"]
Executor = Literal["auto", "inductor", "regions", "aot_eager"]
EXECUTORS: tuple[Executor, ...] = get_args(Executor)
