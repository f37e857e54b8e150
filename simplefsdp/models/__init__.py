"""The Llama 3 family, for the trainer and as an example of a model to wrap.

This module has only data, and imports no torch until ``Llama``, the model, is used.
"""

from typing import TYPE_CHECKING, Any

from simplefsdp.models.configs import (
    CONFIGS,
    DOCUMENT_SEPARATOR,
    LlamaConfig,
    RopeScaling,
    config_of,
    flops_per_token,
    num_parameters,
)

if TYPE_CHECKING:
    from simplefsdp.models.llama3 import Llama

__all__ = [
    "CONFIGS",
    "DOCUMENT_SEPARATOR",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "config_of",
    "flops_per_token",
    "num_parameters",
]


if not TYPE_CHECKING:  # with a __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name != "Llama":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from simplefsdp.models.llama3 import Llama

        return globals().setdefault(name, Llama)
