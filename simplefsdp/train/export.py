"""A checkpoint as a folder that ``transformers`` loads; needs no ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from simplefsdp.checkpoints.opened import fill, verify
from simplefsdp.launcher.errors import UserError
from simplefsdp.models.build import plain_model
from simplefsdp.models.configs import config_of
from simplefsdp.models.hf import write_hf_folder
from simplefsdp.models.options import ModelOptions
from simplefsdp.train import runs
from simplefsdp.train.restore import Checkpoint, check_model, model_keys, open_checkpoint


def export(path: Path, out: Path, dtype: str = "saved", name: str | None = None) -> None:
    """Write the folder, complete or not at all; see the options of the command."""
    checkpoint = open_checkpoint(runs.checkpoint_at(path))
    if checkpoint.trainer:
        name = name or checkpoint.trainer.config["model"]["model"]
    if name is None:
        raise UserError(
            f"{checkpoint.path} does not say which model it is of; name it with --model"
        )
    model = ModelOptions(name)
    check_model(checkpoint, plain_model(model), name)
    note = verify(checkpoint.files, _say_progress, alone=True)
    if note:
        print(f"warning: {note}", file=sys.stderr)
    cast_to = None if dtype == "saved" else getattr(torch, dtype)
    write_hf_folder(out, config_of(model.model), _tensors(checkpoint, model), dtype=cast_to)


def _say_progress(nbytes: int, of: int) -> None:
    print(f"verifying: {nbytes / 1e9:.1f} of {of / 1e9:.1f} GB ...", file=sys.stderr)


def _tensors(checkpoint: Checkpoint, options: ModelOptions) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(plain_model(options).named_parameters())
    for fqn, key in model_keys(checkpoint, parameters).items():
        saved = checkpoint.tensors[key]
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        fill(checkpoint.files, {key: tensor}, no_dist=True)
        yield fqn, tensor
