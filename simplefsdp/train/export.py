"""``simplefsdp export``: a checkpoint as a folder that ``transformers`` loads; needs no ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simplefsdp.launcher.errors import UserError, user_errors

if TYPE_CHECKING:
    from torch import Tensor

_DESCRIPTION = """Write a checkpoint's weights as safetensors with a config.json, the folder format
of Hugging Face transformers. One tensor at a time is in memory, so any model fits.

examples:
  simplefsdp export --checkpoint runs/readme --out exported
  simplefsdp export --checkpoint runs/halves/checkpoints/step-00000020 --out half --dtype bfloat16
"""


@dataclass(frozen=True)
class ExportOptions:
    """What to export."""

    checkpoint: Path
    """A checkpoint, or a run folder: then its latest one."""
    out: Path
    """Folder to write; must not exist."""
    dtype: Literal["saved", "float32", "bfloat16"] = "saved"
    """What to cast the weights to."""
    model: str | None = None
    """Which Llama 3 of ours it is of, for a checkpoint that no simplefsdp trainer wrote."""


def run(args: list[str]) -> int:
    """Run ``simplefsdp export *args``; return the exit code."""
    import tyro

    options = tyro.cli(ExportOptions, prog="simplefsdp export", description=_DESCRIPTION, args=args)
    with user_errors():
        export(options)
    print(f"wrote {options.out}; load it with AutoModelForCausalLM.from_pretrained")
    return 0


def export(options: ExportOptions) -> None:
    """Write the folder, complete or not at all."""
    import torch

    from simplefsdp.checkpoints.opened import fill, verify
    from simplefsdp.models.build import plain_model
    from simplefsdp.models.configs import config_of
    from simplefsdp.models.hf import write_hf_folder
    from simplefsdp.models.options import ModelOptions
    from simplefsdp.train import runs
    from simplefsdp.train.restore import check_model, model_keys, open_checkpoint

    checkpoint = open_checkpoint(runs.checkpoint_at(options.checkpoint))
    name = options.model
    if checkpoint.trainer:
        name = name or checkpoint.trainer.config["model"]["model"]
    if name is None:
        raise UserError(
            f"{checkpoint.path} does not say which model it is of; name it with --model"
        )
    model = plain_model(ModelOptions(name))
    check_model(checkpoint, model, name)
    note = verify(checkpoint.files, _say_progress, alone=True)
    if note:
        print(f"warning: {note}", file=sys.stderr)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for fqn, key in model_keys(checkpoint, dict(model.named_parameters())).items():
            saved = checkpoint.tensors[key]
            tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
            fill(checkpoint.files, {key: tensor}, no_dist=True)
            yield fqn, tensor

    dtype = None if options.dtype == "saved" else getattr(torch, options.dtype)
    write_hf_folder(options.out, config_of(name), tensors(), dtype=dtype)


def _say_progress(nbytes: int, of: int) -> None:
    print(f"verifying: {nbytes / 1e9:.1f} of {of / 1e9:.1f} GB ...", file=sys.stderr)
