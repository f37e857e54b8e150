"""Hugging Face's ``generate`` where ranks share a model.

Each token is a forward, which gathers: a rank whose texts have ended must go on for as long as any
other, or the others wait for it for ever. With ``synced_gpus=True`` ``generate`` does so. It sets
that by itself for modules with a mark of FSDP2's; ours have no such mark, since Dynamo would guard
less of them. So it is set here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.kept import kept_of
from simplefsdp.frontend.wrapped import layouts_of


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: its ``generate``, if it is one that can wait for other ranks."""
    own = getattr(cls, "generate", None)
    if not inspect.isfunction(own):
        return {}
    signature = inspect.signature(own)
    if "synced_gpus" not in signature.parameters:
        return {}

    @functools.wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        if given.get("synced_gpus") is None and _all_ranks_gather(self):
            kwargs["synced_gpus"] = True
        return own(self, *args, **kwargs)

    return {"generate": generate}


def _all_ranks_gather(model: nn.Module) -> bool:
    """Whether a forward gathers over all ranks: those that transformers asks whether they are done.
    Not if each rank has, or keeps, full parameters."""
    return any(
        isinstance(param := module._parameters.get(name), DTensor)
        and layout.spec.shard_ranks > 1
        and param.device_mesh.size() == dist.get_world_size()
        and kept_of(module, name) is None
        for module in model.modules()
        for name, layout in layouts_of(module).items()
    )
