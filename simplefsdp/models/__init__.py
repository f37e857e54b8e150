"""The Llama 3 family, for the trainer and as an example of a model to wrap.

What is here is data, and imports no torch; ``llama3.Llama`` is the model.
"""

from simplefsdp.models.configs import (
    CONFIGS,
    DOCUMENT_SEPARATOR,
    LlamaConfig,
    RopeScaling,
    flops_per_token,
    num_parameters,
)

__all__ = [
    "CONFIGS",
    "DOCUMENT_SEPARATOR",
    "LlamaConfig",
    "RopeScaling",
    "flops_per_token",
    "num_parameters",
]
