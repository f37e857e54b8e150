"""The Llama 3 family, for the trainer and as an example of a model to wrap."""

from simplefsdp.models.configs import (
    CONFIGS,
    DOCUMENT_SEPARATOR,
    LlamaConfig,
    RopeScaling,
    flops_per_token,
    num_parameters,
)
from simplefsdp.models.llama3 import Llama
from simplefsdp.models.tensor_parallel import apply_tensor_parallel, tensor_parallel_plan

__all__ = [
    "CONFIGS",
    "DOCUMENT_SEPARATOR",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "apply_tensor_parallel",
    "flops_per_token",
    "num_parameters",
    "tensor_parallel_plan",
]
