"""The Llama 3 family, for the trainer and as an example of a model to wrap.

What is here is data, and imports no torch, until somebody asks for ``Llama``, the model.
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


if not TYPE_CHECKING:  # a type checker would believe that there is every name

    def __getattr__(name: str) -> Any:
        if name != "Llama":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from simplefsdp.models.llama3 import Llama

        return globals().setdefault(name, Llama)
