"""Export to the folder format of Hugging Face `transformers`' Llama."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp.models.configs import LlamaConfig, RopeScaling
from simplefsdp.models.llama3 import Llama
from simplefsdp.pretrained.writer import Writer, complete_folder, in_files, write_json


def to_hf_name(fqn: str) -> str:
    """The name in `transformers`' LlamaForCausalLM of our parameter `fqn`."""
    return fqn if fqn.startswith("lm_head.") else f"model.{fqn}"


def to_hf_config(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The contents of `config.json`, with the keys of Meta's own Llama 3 repositories; `dtype` is
    the dtype of the weights in the same folder."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _hf_rope_scaling(scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _hf_rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def write_hf_folder(
    folder: Path,
    config: LlamaConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that `LlamaForCausalLM.from_pretrained` loads; call it on one rank.

    The folder appears complete or not at all. No more than one shard is held in memory beyond
    what `tensors` holds, so an iterator can stream a model larger than memory.

    Args:
        folder: Where to write; must not exist, or be empty.
        config: The model's.
        tensors: Every parameter by our FQN, whole, in any order; on any device.
        dtype: Cast to it; None keeps the dtype of the tensors.
        max_shard_nbytes: Begin another `model-*.safetensors` rather than exceed this.

    Raises:
        ValueError: `folder` holds something; a parameter is missing, unknown, given twice, or of
            another shape than `config` says.
        TypeError: A tensor is a DTensor, or dtypes are mixed and no `dtype` is given.
    """
    with complete_folder(Path(folder).absolute()) as partial:
        writer, written_dtype = Writer(partial), torch.float32
        checked = _checked(config, tensors, dtype)
        renamed = ((to_hf_name(fqn), tensor) for fqn, tensor in checked)
        for batch in in_files(renamed, max_shard_nbytes):
            written_dtype = next(iter(batch.values())).dtype
            writer.write(batch)
        writer.finish()
        write_json(partial / "config.json", to_hf_config(config, written_dtype))


def _checked(
    config: LlamaConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each on the CPU and in one dtype, after checking that the model needs it."""
    with torch.device("meta"):
        missing = {fqn: tuple(p.shape) for fqn, p in Llama(config).named_parameters()}
    seen: set[str] = set()
    first = dtype
    for fqn, tensor in tensors:
        if fqn not in missing:
            twice = f"{fqn} was given twice: pass each parameter once"
            unknown = f"the model has no parameter {fqn}: export with the config it had"
            raise ValueError(twice if fqn in seen else unknown)
        shape = missing.pop(fqn)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{fqn} has shape {tuple(tensor.shape)}, the model needs {shape}: export with the "
                "config the model was trained with"
            )
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{fqn} is a DTensor: gather it on every rank with full_tensor(), then write on one"
            )
        first = first or tensor.dtype
        if dtype is None and tensor.dtype != first:
            raise TypeError(
                f"{fqn} is {tensor.dtype}, those before it are {first}: pass dtype= to cast"
            )
        seen.add(fqn)
        yield fqn, tensor.detach().to("cpu", first)
    if missing:
        some = ", ".join(list(missing)[:3])
        raise ValueError(
            f"{len(missing)} parameters are missing ({some}{', ...' if len(missing) > 3 else ''}): "
            "pass the full state dict of the model"
        )
