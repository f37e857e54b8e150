"""What users of FSDP call and a wrapped module does not have: an error says what to do instead."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_COLLECTIVES = "the compiler makes, merges and orders the collectives; leave it out"

_ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # of a module, before anything else
# Methods of FSDP2's modules, and two of FSDP's.
_INSTEAD = {
    "set_manual_backward_finalization": "defer by set_requires_gradient_sync(False), then call "
    "finalize_backward()",
    "set_all_reduce_hook": "pass a 2-D mesh and mode='hybrid_shard' to simple_fsdp",
    "set_custom_all_gather": _COLLECTIVES,
    "set_custom_reduce_scatter": _COLLECTIVES,
    "set_separate_reduce_scatter_group": "pass options={'separate_reduce_group': True}",
    "set_keep_unsharded_storage": "for CUDA graphs, pass options={'cudagraphs': True}",
    "set_reduce_scatter_unused_params": "ranks must use the same parameters; where "
    "one has no input for a module, call it on zeros and add 0 * output",
    "summon_full_params": "use `with simplefsdp.unsharded(model):`",
    "clip_grad_norm_": "use simplefsdp.clip_grad_norm_(model, max_norm)",
}


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """For the subclass of ``cls``: methods that raise, for what ``cls`` lacks, and for pickling."""
    missing = {name: _method(name) for name in _INSTEAD if not hasattr(cls, name)}
    refusing: dict[str, Any] = {**missing, "__reduce_ex__": _reduce_ex(cls)}
    if not hasattr(cls, _ASKED_BY_DDP):
        refusing[_ASKED_BY_DDP] = _RefusesDdp()
    if hasattr(cls, "save_pretrained"):
        refusing["save_pretrained"] = _save_pretrained(cls)
    if hasattr(cls, "resize_token_embeddings"):
        refusing["resize_token_embeddings"] = _resize_token_embeddings(cls)
    return refusing


class _RefusesDdp:
    """For an attribute that others may set, or ask for (``torch.jit.trace`` asks for all)."""

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == DistributedDataParallel.__module__:
            raise ValueError(
                f"DistributedDataParallel({cls.__name__}): simple_fsdp has wrapped it, and reduces "
                "its gradients; leave DistributedDataParallel out, or what calls it: a trainer's "
                "prepare, or its launcher"
            )
        raise AttributeError(_ASKED_BY_DDP)


def _method(name: str) -> Callable[..., Any]:
    def refuse(self: nn.Module, *_: Any, **__: Any) -> Any:
        raise AttributeError(
            f"{type(self).__name__}.{name}: a module wrapped by simple_fsdp has no such method; "
            f"{_INSTEAD[name]}"
        )

    refuse.__name__ = name
    return refuse


def _save_pretrained(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.save_pretrained)  # type: ignore[attr-defined]
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise ValueError(
                f"{cls.__name__}.save_pretrained: would write this rank's shards; call it on rank "
                "0 inside `with simplefsdp.unsharded(model):`, or, of a model of transformers, "
                "simplefsdp.save_pretrained(model, folder) on all ranks (of PEFT's models, that of "
                "simplefsdp.integrations.peft)"
            )
        return cls.save_pretrained(self, *args, **kwargs)  # type: ignore[attr-defined]

    return save_pretrained


def _resize_token_embeddings(cls: type[nn.Module]) -> Callable[..., Any]:
    own: Callable[..., Any] = cls.resize_token_embeddings  # type: ignore[attr-defined]

    @functools.wraps(own)
    def resize_token_embeddings(
        self: nn.Module, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if _changes_size(self, new_num_tokens, *args, **kwargs):
            raise ValueError(
                f"{cls.__name__}.resize_token_embeddings: would make parameters that are not "
                "sharded; call it before simple_fsdp"
            )
        return own(self, new_num_tokens, *args, **kwargs)

    return resize_token_embeddings


def _changes_size(
    model: Any, wanted: int | None = None, multiple: int | None = None, *_: Any, **others: Any
) -> bool:
    """Whether a sharded embedding would get another number of rows, as transformers counts it."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, DTensor):
        return False
    rows: int = weight.shape[0] if wanted is None else wanted
    multiple = others.get("pad_to_multiple_of", multiple) or 1
    return -(-rows // multiple) * multiple != weight.shape[0]


def _reduce_ex(cls: type[nn.Module]) -> Callable[..., Any]:
    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        # copy.deepcopy, which works, asks for the same as pickle, which cannot find the class.
        if sys._getframe(1).f_globals.get("__name__") == "copy":
            return cls.__reduce_ex__(self, protocol)
        raise TypeError(
            f"model: a {cls.__name__} wrapped by simple_fsdp cannot be pickled; save "
            "model.state_dict() (torch.distributed.checkpoint.save), and load it into a model that "
            "is wrapped in the same way"
        )

    return reduce_ex
