"""SimpleFSDP: compiler-based Fully Sharded Data Parallel for PyTorch.

Wrap once, compile, train::

    simple_fsdp(model, mesh)
    model.compile(backend="simplefsdp")

Read the code in this order; each folder imports only those above it:

1. ``frontend``, the wrap: parameters become shards, and reading one gathers it.
2. ``compiler``, the backend: it checks a graph, plans it, and calls ``inductor_passes``.
   ``step``: a forward, its backward and the update as one graph.
3. ``simulation``: predicts the time and memory of a step without running it.
4. ``pretrained``: loads a folder of safetensors files, and saves one. ``checkpoints``: the files of
   a distributed checkpoint, which are checked and never unpickled.
5. ``models`` and ``launcher``, then ``sweep``, then ``inspection``, ``train``, ``calibrate`` and
   ``integrations``, and ``cli``.

All of them use the files beside this one, such as ``rank_guard``: ranks that are about to
communicate differently find out before they do.

The public names are imported at their first use, because the command line reads its options without
torch, which takes seconds to import.

``_torch`` holds the private parts of PyTorch that this package uses; its contract is
``tests/_torch/test_torch_contract.py``.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from simplefsdp.cache_folder import leave_unusable_cache_folder
from simplefsdp.version import __version__

if TYPE_CHECKING:
    from simplefsdp.frontend.accumulation import microbatch
    from simplefsdp.frontend.full_parameters import raw_parameters, unsharded
    from simplefsdp.frontend.grad_norm import clip_grad_norm_
    from simplefsdp.frontend.initialize import init_weights
    from simplefsdp.frontend.parametrization import register_forward_method
    from simplefsdp.frontend.wrap import simple_fsdp
    from simplefsdp.inspection.capture import inspect
    from simplefsdp.pretrained.load import load_pretrained
    from simplefsdp.pretrained.save import full_state_dict, save_pretrained
    from simplefsdp.step.compile_step import compile_step

__all__ = [
    "__version__",
    "clip_grad_norm_",
    "compile_step",
    "full_state_dict",
    "init_weights",
    "inspect",
    "load_pretrained",
    "microbatch",
    "raw_parameters",
    "register_forward_method",
    "save_pretrained",
    "simple_fsdp",
    "unsharded",
]

_MODULE_OF = {
    "clip_grad_norm_": "frontend.grad_norm",
    "compile_step": "step.compile_step",
    "full_state_dict": "pretrained.save",
    "init_weights": "frontend.initialize",
    "inspect": "inspection.capture",
    "load_pretrained": "pretrained.load",
    "microbatch": "frontend.accumulation",
    "raw_parameters": "frontend.full_parameters",
    "register_forward_method": "frontend.parametrization",
    "save_pretrained": "pretrained.save",
    "simple_fsdp": "frontend.wrap",
    "unsharded": "frontend.full_parameters",
}


if not TYPE_CHECKING:  # with a __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name or submodule at its first use; a name then stays as a global."""
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            return globals().setdefault(name, value)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


leave_unusable_cache_folder()  # before anything imports the compiler
