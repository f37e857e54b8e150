"""Tensor parallelism of the Llama 3 family: which matrix is split along which dimension."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from simplefsdp.models.configs import LlamaConfig
from simplefsdp.models.llama3 import Llama


def apply_tensor_parallel(model: Llama, tp_mesh: DeviceMesh) -> Llama:
    """Splits the model over `tp_mesh`, in place; call it before `simple_fsdp`.

    Queries, keys, values, gate and up are split by output, o and down by input, so a layer costs
    two all-reduces in the forward and two in the backward. Embedding and output matrix are split
    over the vocabulary and the logits come back whole. Norms stay whole, and so does a tied
    embedding, which serves both as a lookup and as a matrix.

    Args:
        model: The model, on the mesh's device or on meta.
        tp_mesh: A 1-D mesh of the ranks that share one copy of the model.

    Raises:
        ValueError: The mesh is not 1-D, or a width does not divide among its ranks.
    """
    if tp_mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism needs a 1-D mesh, got {tp_mesh.ndim} dimensions: pass one "
            'dimension of it, such as mesh["tp"]'
        )
    _check_divisible(model.config, tp_mesh.size())
    plan: dict[str, ParallelStyle] = {
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
    }
    if not model.config.tie_embeddings:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, tp_mesh, plan)
    return model


def _check_divisible(config: LlamaConfig, tp_size: int) -> None:
    widths = {name: getattr(config, name) for name in ("n_heads", "n_kv_heads", "ffn_dim")}
    sizes = range(1, config.n_kv_heads + 1)
    for name, width in widths.items():
        if width % tp_size:
            options = [n for n in sizes if not any(other % n for other in widths.values())]
            raise ValueError(
                f"{name} = {width} does not divide among {tp_size} tensor-parallel ranks: choose "
                f"a tensor-parallel size out of {options} for this model"
            )
