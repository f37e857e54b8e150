"""A wrapped model's tensors, by their names in the plain model."""

from typing import Any

import torch
from torch import Tensor, nn

from simplefsdp.frontend.wrapped import is_wrapped
from simplefsdp.words import few

_COMPILED = "_orig_mod."  # torch.compile(module) puts it into names


def wrapped_model(model: object) -> nn.Module:
    """``model``, without the module that ``torch.compile`` may have put around it."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module) or not is_wrapped(inner):
        raise ValueError(
            f"model: expected a module wrapped by simple_fsdp, got {type(model).__name__}"
        )
    return inner


def plain_name(name: str) -> str:
    """``name`` without the prefixes that ``torch.compile`` adds."""
    return name.replace(_COMPILED, "")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, the model's own objects; tied ones have several names."""
    return {name: value for name, value in state_of(model).items() if isinstance(value, Tensor)}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Like :func:`tensors_of`, with the extra state of modules, which may be any object."""
    return {plain_name(k): value for k, value in model.state_dict(keep_vars=True).items()}


def refuse_meta(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if a tensor has no values."""
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise ValueError(
            f"{few(empty)}: on the meta device, without values; call simplefsdp.load_pretrained or "
            "simplefsdp.init_weights first"
        )


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors files."""
