"""The tensors of a training state, under the names that torch's own checkpoints use.

The names are ``model.<fqn>`` and ``optimizer.state.<fqn>.<name>``, with the FQNs of the plain
model. So the plain model, FSDP2 and any number of ranks read our checkpoints, and we read theirs.
"""

import json
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from inductor_passes.ir.json_file import parse_json

MODEL = "model"
OPTIMIZER = "optimizer"
RNG = "rng"

_PYTHON_RNG_NBYTES = 8192


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device
) -> dict[str, Any]:
    """Everything a checkpoint holds as tensors; the tensors are the live ones, not copies."""
    return {
        MODEL: model.state_dict(),
        OPTIMIZER: get_optimizer_state_dict(model, optimizer),
        RNG: {str(rank): rng_state(device)},
    }


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The random states of this process, as uint8 tensors of fixed size."""
    python = json.dumps(random.getstate()).encode().ljust(_PYTHON_RNG_NBYTES)
    state = {
        "python": torch.frombuffer(bytearray(python), dtype=torch.uint8),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned."""
    try:
        version, internal, gauss = parse_json(bytes(state["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"its random states are not of {device.type}, or damaged") from error


def seed_rng(seed: int, rank: int) -> None:
    """Seed this rank's random states; different on every rank, the same on every start."""
    random.seed(seed * 1_000_003 + rank)
    torch.manual_seed(seed * 1_000_003 + rank)
