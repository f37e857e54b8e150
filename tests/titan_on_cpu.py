"""torchtitan where there is no accelerator: it takes "cuda" for granted, and asks CUDA for memory.

Import this before torchtitan, in a process of its own: torchtitan changes torch for good.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import nn

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.distributed.utils as dist_utils  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

SMALL = [
    *("--training.seq_len", "32"),
    *("--training.local_batch_size", "2"),
    *("--training.global_batch_size", "8"),
    *("--training.mixed_precision_param", "float32"),
    "--training.disable_cuda_graphs",
    *("--optimizer.implementation", "for-loop"),
    "--debug.deterministic",
    *("--debug.seed", "0"),
    "--validator.no-enable",
    "--checkpoint.enable",
    *("--checkpoint.interval", "2"),
    "--checkpoint.no-last-save-model-only",
    "--checkpoint.no-initial-load-model-only",
    *("--parallelism.spmd_backend", "partial_dtensor"),
]


class Trained(NamedTuple):
    steps: dict[int, tuple[float, float]]  # loss and norm of the gradients
    parameters: dict[str, Any]
    digest: str


class _NoMemory:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = _NoMemory
# It passes barrier() a device's index, which gloo's has not.
dist_utils.set_pg_timeouts = lambda *args, **kwargs: None


_undivided = titan_fsdp.disable_fsdp_gradient_division


def _sum_gradients(model: nn.Module) -> None:
    """FSDP2 sums by ``PREMUL_SUM``, which gloo has not, unless it is told not to."""
    _undivided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


titan_fsdp.disable_fsdp_gradient_division = _sum_gradients


def train(module: str, name: str, *arguments: str) -> Trained:
    """What ``python -m torchtitan.train --module module --config name arguments`` does, small."""
    config = ConfigManager().parse_args(["--module", module, "--config", name, *SMALL, *arguments])
    model = config.model_spec.model
    stages = "--parallelism.pipeline_parallel_degree" in arguments
    del model.layers[1 + stages :]
    for layer in model.layers:  # FlexAttention has no backward on a CPU; SDPA needs no mask
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = config.build()
    steps = {}
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, max_loss: float, norm: float, **more: Any) -> None:
        steps[step] = (loss, norm)
        log(step, loss, max_loss, norm, **more)

    trainer.metrics_processor.log = note
    try:
        trainer.train()
        return Trained(steps, *_state_of(trainer))
    finally:
        trainer.close()
        torch._dynamo.reset()


def _state_of(trainer: Trainer) -> tuple[dict[str, Any], str]:
    """Full parameters, and a digest of this rank's parameters and moments."""
    own = hashlib.sha256()
    full = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                full[name] = param.detach().full_tensor().numpy()
                for tensor in (param.detach(), *optimizer.state[param].values()):
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    own.update(local.numpy().tobytes())
    return full, own.hexdigest()
