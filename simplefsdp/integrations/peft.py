"""PEFT's adapters of a wrapped model, gathered and saved without the frozen base.

Call ``get_peft_model`` before ``simple_fsdp``, as it adds parameters.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import PeftModel
from peft.utils import get_peft_model_state_dict

from simplefsdp.integrations import checkpoint


def save_pretrained(model: PeftModel, folder: Path | str, **kwargs: Any) -> None:
    """``model.save_pretrained(folder, **kwargs)`` for a wrapped model. Every rank must call it.

    ``PeftModel.from_pretrained(base, folder)`` reads the folder into a plain model.
    """
    first = dist.get_rank() == 0
    state = adapter_state_dict(model, keep=first)
    if first:
        model.save_pretrained(str(folder), state_dict=state, **kwargs)
    dist.barrier()


def adapter_state_dict(model: PeftModel, *, keep: bool) -> dict[str, Any]:
    """The part of the model's ``state_dict`` that PEFT saves, as full tensors; empty on ranks that
    do not ``keep`` it. Every rank must call it.
    """
    shards = model.state_dict(keep_vars=True)
    chosen = {
        id(value)
        for adapter in model.peft_config
        for value in get_peft_model_state_dict(model, shards, adapter).values()
    }
    adapters = {key: value for key, value in shards.items() if id(value) in chosen}
    return checkpoint.gathered(model, adapters, keep=keep)
