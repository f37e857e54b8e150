"""Makes the buffers that no file has, such as the frequencies of rotary embeddings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from simplefsdp.frontend.initialize import reset_parameters
from simplefsdp.frontend.wrapped import plain_classes, wrapped_parts
from simplefsdp.pretrained.huggingface import is_transformers
from simplefsdp.words import few

_KEEP = "_is_hf_initialized"  # transformers' initialisers skip tensors with this attribute


class BlankBuffers(NamedTuple):
    """A module's buffers without values, and the model of transformers that it is part of."""

    path: str
    module: nn.Module
    names: list[str]
    model: nn.Module | None


def without_values(model: nn.Module) -> list[BlankBuffers]:
    """Buffers on meta that are not in the model's ``state_dict``."""
    found = []
    models: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_transformers(module):
            models[path] = module
        unsaved = module._non_persistent_buffers_set
        own = module._buffers.items()
        names = [n for n, b in own if b is not None and b.is_meta and n in unsaved]
        if names:
            around = [p for p in models if not p or path == p or path.startswith(f"{p}.")]
            inner = models[max(around, key=len)] if around else None
            found.append(BlankBuffers(path, module, names, inner))
    return found


def make(model: nn.Module, places: list[BlankBuffers]) -> None:
    """Have the model's own initialisers write the buffers, which must have memory.

    Values that these also write to parameters are overwritten later.
    """
    kept = [*model.parameters(), *model.buffers()]
    lost = []
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with plain_classes(wrapped_parts(model)), torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)  # the same on all ranks
        for path, module, names, owner in places:
            blank = {name: module._buffers[name] for name in names}
            with _kept(kept, except_for=blank.values()):
                if owner is not None:
                    owner._init_weights(module)  # type: ignore[operator]
            if any(_is_blank(module, name, blank[name]) for name in names):
                reset_parameters(module)
            still = [name for name in names if _is_blank(module, name, blank[name])]
            lost += [f"{path}.{name}" if path else name for name in still]
    if lost:
        raise ValueError(
            f"{few(lost)}: a buffer that files do not have, was built on the meta device, and "
            "nothing makes its values; give its module a reset_parameters() that writes it in "
            "place, or build the model without torch.device('meta') around such buffers"
        )


def _is_blank(module: nn.Module, name: str, made: Tensor | None) -> bool:
    """Whether the buffer is still the tensor that was made, and nothing was written to it."""
    now = module._buffers.get(name)
    return now is not None and now is made and now._version == 0


@contextmanager
def _kept(tensors: list[Tensor], except_for: object) -> Iterator[None]:
    exempt = {id(tensor) for tensor in except_for}  # type: ignore[attr-defined]
    marked = [t for t in tensors if id(t) not in exempt and not hasattr(t, _KEEP)]
    for tensor in marked:
        setattr(tensor, _KEEP, True)
    try:
        yield
    finally:
        for tensor in marked:
            tensor.__dict__.pop(_KEEP, None)
