"""``simplefsdp export``: from the command line to a folder of safetensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simplefsdp.launcher.errors import user_errors

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
    from simplefsdp.train.export import export

    with user_errors():
        export(options.checkpoint, options.out, options.dtype, options.model)
    print(f"wrote {options.out}; load it with AutoModelForCausalLM.from_pretrained")
    return 0
