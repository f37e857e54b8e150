"""The Llama 3 family, for the trainer and as an example of a model to wrap.

What is imported here is data, and takes no torch; ``llama3`` has the model.
"""

from simplefsdp.models.configs import (
    CONFIGS,
    DOCUMENT_SEPARATOR,
    LlamaConfig,
    RopeScaling,
    config_of,
    flops_per_token,
    num_parameters,
)

__all__ = [
    "CONFIGS",
    "DOCUMENT_SEPARATOR",
    "LlamaConfig",
    "RopeScaling",
    "config_of",
    "flops_per_token",
    "num_parameters",
]
