"""SimpleFSDP: compiler-based Fully Sharded Data Parallel for PyTorch.

Wrap once, compile, train::

    model = simple_fsdp(model, mesh)
    model = torch.compile(model, backend="simplefsdp")
"""

from simplefsdp import _torch
from simplefsdp.grad_norm import clip_grad_norm_
from simplefsdp.initialize import init_weights
from simplefsdp.parametrization import register_forward_method
from simplefsdp.unsharded import raw_parameters, unsharded
from simplefsdp.watch import inspect
from simplefsdp.wrap import simple_fsdp

__all__ = [
    "clip_grad_norm_",
    "init_weights",
    "inspect",
    "raw_parameters",
    "register_forward_method",
    "simple_fsdp",
    "unsharded",
]
__version__ = "0.1.0"

_torch.compile_modules_of_torch_too("simplefsdp", "simplefsdp.backend.simplefsdp")
