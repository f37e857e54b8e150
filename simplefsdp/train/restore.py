"""Loading: our checkpoints and FSDP2's, on any number of ranks.

A checkpoint is checked against the model and against its own files before anything is loaded.
These checks read only metadata, so a bad checkpoint is refused before a rank is started.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.opened import REMEDY, CheckpointFiles, fill, open_files
from simplefsdp.train import runs
from simplefsdp.train.runs import TrainerState
from simplefsdp.train.state import MODEL, RNG, set_rng_state


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, of which only the metadata has been read."""

    files: CheckpointFiles
    trainer: TrainerState | None  # None if another program (FSDP2, say) wrote it

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.files.path

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Global shape and dtype of every tensor in it, by key."""
        entries = self.files.metadata.state_dict_metadata.items()
        return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's metadata and check that its files are there and long enough."""
    found = Checkpoint(open_files(path), runs.read_trainer_state(path))
    if found.files.checksums is None and found.trainer and found.trainer.checksums:
        raise ValueError(
            f"checkpoint {path} is damaged: {checksums.NAME} is missing; "
            f'{REMEDY}; or, to load it unverified, write "checksums": false into its trainer.json'
        )
    return found


def check_model(checkpoint: Checkpoint, model: nn.Module, name: str) -> None:
    """Raise ValueError unless the checkpoint holds exactly the parameters of ``model``, whose
    ``--model`` name is ``name``; the model may be on meta."""
    trained = checkpoint.trainer.config["model"]["model"] if checkpoint.trainer else name
    if trained != name:
        raise ValueError(
            f"checkpoint {checkpoint.path} is of --model {trained}, not --model {name}"
        )
    expected = {fqn: tensor.shape for fqn, tensor in model.state_dict().items()}
    keys = model_keys(checkpoint, expected)
    for fqn, shape in expected.items():
        entry = checkpoint.tensors.get(keys[fqn])
        if entry is None or entry.size != shape:
            has = "has no" if entry is None else f"has {list(entry.size)} for"
            raise ValueError(
                f"checkpoint {checkpoint.path} is of another model: it {has} {fqn}, which is "
                f"{list(shape)} in --model {name}"
            )
    first_fqn, first_key = next(iter(keys.items()))
    prefix = first_key.removesuffix(first_fqn)
    # Without a prefix the model's tensors cannot be told from others.
    beside = {k for k in checkpoint.tensors if prefix and k.startswith(prefix)} - {*keys.values()}
    if beside:
        raise ValueError(
            f"checkpoint {checkpoint.path} is of a larger model: {min(beside)}, for one, is not "
            f"in --model {name}"
        )


def model_keys(checkpoint: Checkpoint, fqns: Iterable[str]) -> dict[str, str]:
    """The checkpoint's key for each FQN. A key is the FQN behind a prefix: ``model.`` in our
    checkpoints, anything or nothing in those of other programs."""
    fqns = list(fqns)
    candidates = [k for k in checkpoint.tensors if k == fqns[0] or k.endswith(f".{fqns[0]}")]
    prefix = min(candidates, key=len, default=f"{MODEL}.{fqns[0]}").removesuffix(fqns[0])
    return {fqn: prefix + fqn for fqn in fqns}


def _optimizer_prefix(checkpoint: Checkpoint, fqn: str) -> str | None:
    """The part of a key before ``<fqn>.exp_avg``; None if there is no optimizer state."""
    moment = f"{fqn}.exp_avg"
    keys = (k for k in checkpoint.tensors if k.endswith(f".state.{moment}"))
    return next((key.removesuffix(moment) for key in keys), None)


def load_training_state(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> bool:
    """Load weights and, if the checkpoint has it, optimizer state, in place, on all ranks.

    The model may be sharded in any way. Returns whether there was optimizer state; a ValueError
    says what cannot be read.
    """
    tensors = model.state_dict()
    keys = model_keys(checkpoint, tensors)
    targets: dict[str, Any] = {keys[fqn]: tensor for fqn, tensor in tensors.items()}
    trained = (fqn for fqn, param in model.named_parameters() if param.requires_grad)
    state_prefix = _optimizer_prefix(checkpoint, next(trained))
    if state_prefix is not None:
        # This call creates the optimizer state by a step that changes no parameter.
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for fqn, state in states.items():
            targets |= {f"{state_prefix}{fqn}.{name}": value for name, value in state.items()}
    fill(checkpoint.files, targets)
    return state_prefix is not None


def load_rng_state(checkpoint: Checkpoint, rank: int, device: torch.device) -> None:
    """Restore this rank's random states; a ValueError says that they are damaged. Call it only if
    there are as many ranks as saved the checkpoint."""
    prefix = f"{RNG}.{rank}."
    state = {
        key.removeprefix(prefix): torch.empty(entry.size, dtype=torch.uint8)
        for key, entry in checkpoint.tensors.items()
        if key.startswith(prefix)
    }
    fill(checkpoint.files, {prefix + name: value for name, value in state.items()})
    try:
        set_rng_state(state, device)
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint.path}: {error}") from error
