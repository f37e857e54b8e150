"""How often Dynamo compiles one function before it runs it as it is."""

from typing import Any


def recompile_limit() -> int:
    """How often."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def recompile_at_least(times: int) -> None:
    """Have Dynamo compile each function so often, unless somebody has said how often."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    if config._is_default("recompile_limit") and config.recompile_limit < times:
        config.recompile_limit = times
