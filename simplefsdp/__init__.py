"""SimpleFSDP: compiler-based Fully Sharded Data Parallel for PyTorch.

Wrap once, compile, train::

    simple_fsdp(model, mesh)
    model.compile(backend="simplefsdp")

Read the code in this order:

1. The wrap. ``wrap`` and ``placement`` make parameters shards; ``parametrization`` makes reading
   one a gather, and ``gather`` is that gather with its backward, the reduce. ``init_flow``,
   ``full_parameters``, ``slots``, ``outside``, ``after_wrap`` and ``refused`` make FSDP2's habits
   work outside of forward, or refuse them by name. ``accumulation`` defers reduces, ``kept`` keeps
   full parameters, and ``control`` is FSDP2's methods for both.
2. The compiler's backend. ``options`` are the user's; ``backend`` checks a Dynamo graph and asks
   the ranks to agree on it (``rank_guard``); ``dedupe`` leaves one gather per parameter,
   ``recompute`` and ``reshard`` say which are made again in backward; ``compilation`` plans each
   graph (``plans``: one rank for all), logs it (``census``; ``size_limits``, if sizes are open),
   and calls the passes of ``inductor_passes``. Of layers that are alike a few are traced:
   ``shorten`` puts a ``stand_in`` for the others, and ``lengthen`` takes it out again.
3. Steps that are not run. ``trace`` makes the graphs of a step without memory,
   ``repeated_layers`` and ``extrapolate_depth`` those of a deep model from a shallow one's, and
   ``prediction`` prices them.
4. ``pretrained``: values from a folder of safetensors files, and back. ``checkpoints``: the files
   of distributed ones, which are checked and never unpickled.
5. ``inspection``, ``models``, ``train``, ``calibrate``, ``integrations`` and ``cli``, which nothing
   above imports.

What is named here is imported when it is asked for, as the command line needs no torch to be read.

``_torch`` holds every private part of PyTorch; ``tests/test_torch_contract.py`` is its contract.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from simplefsdp.cache_folder import leave_cache_folder_that_cannot_be_written
from simplefsdp.version import __version__

if TYPE_CHECKING:
    from simplefsdp.accumulation import microbatch
    from simplefsdp.full_parameters import raw_parameters, unsharded
    from simplefsdp.grad_norm import clip_grad_norm_
    from simplefsdp.initialize import init_weights
    from simplefsdp.inspection.capture import inspect
    from simplefsdp.parametrization import register_forward_method
    from simplefsdp.pretrained.load import load_pretrained
    from simplefsdp.pretrained.save import full_state_dict, save_pretrained
    from simplefsdp.wrap import simple_fsdp

__all__ = [
    "__version__",
    "clip_grad_norm_",
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
    "clip_grad_norm_": "grad_norm",
    "full_state_dict": "pretrained.save",
    "init_weights": "initialize",
    "inspect": "inspection.capture",
    "load_pretrained": "pretrained.load",
    "microbatch": "accumulation",
    "raw_parameters": "full_parameters",
    "register_forward_method": "parametrization",
    "save_pretrained": "pretrained.save",
    "simple_fsdp": "wrap",
    "unsharded": "full_parameters",
}


if not TYPE_CHECKING:  # a type checker would believe that there is every name

    def __getattr__(name: str) -> Any:
        """A public name or file, when somebody asks for it, and from then on a global one."""
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            return globals().setdefault(name, value)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


leave_cache_folder_that_cannot_be_written()  # before anything imports the compiler
