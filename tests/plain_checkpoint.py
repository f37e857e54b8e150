"""A checkpoint's weights in the plain model, in one process: as the command ``export`` reads it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from simplefsdp.checkpoints.opened import fill, verify
from simplefsdp.train.restore import check_model, model_keys, open_checkpoint


def load_plain(path: Path, model: nn.Module) -> str | None:
    """Fill ``model``; returns what is to be told of the checkpoint."""
    checkpoint = open_checkpoint(path)
    trained = checkpoint.trainer.config["model"]["model"] if checkpoint.trainer else "this model"
    check_model(checkpoint, model, trained)
    note = verify(checkpoint.files, alone=True)
    tensors = model.state_dict()
    keys = model_keys(checkpoint, tensors)
    fill(checkpoint.files, {keys[fqn]: t for fqn, t in tensors.items()}, no_dist=True)
    return note
