"""Export to the folder format of Hugging Face `transformers`' Llama."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp.models.configs import LlamaConfig
from simplefsdp.models.llama3 import Llama


def to_hf_name(fqn: str) -> str:
    """The name in `transformers`' LlamaForCausalLM of our parameter `fqn`."""
    return fqn if fqn.startswith("lm_head.") else f"model.{fqn}"


def to_hf_config(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The contents of `config.json`, with the keys of Meta's own Llama 3 repositories.

    Args:
        config: The model.
        dtype: The dtype of the weights beside it.

    Returns:
        A dict of JSON values.
    """
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
        "rope_scaling": _hf_rope_scaling(config),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _hf_rope_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
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
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that `LlamaForCausalLM.from_pretrained` loads; call it on one rank.

    The folder appears complete or not at all. No more than one shard is held in memory beyond
    what `tensors` holds, so an iterator can stream a model larger than memory.

    Args:
        folder: Where to write; must not exist, or be empty.
        config: The model.
        tensors: Every parameter by our FQN, whole, in any order; on any device.
        dtype: Cast to it; None keeps the dtype of the tensors.
        max_shard_nbytes: Begin another `model-*.safetensors` rather than exceed this.

    Raises:
        ValueError: `folder` holds something; a parameter is missing, unknown, given twice, or of
            another shape than `config` says.
        TypeError: A tensor is a DTensor, or dtypes are mixed and no `dtype` is given.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: choose another folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had our id
    partial.mkdir()
    try:
        writer = _ShardWriter(partial, max_shard_nbytes)
        for fqn, tensor in _checked(config, tensors, dtype):
            writer.add(to_hf_name(fqn), tensor)
        writer.finish()
        _write_json(partial / "config.json", to_hf_config(config, writer.dtype))
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _checked(
    config: LlamaConfig,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
) -> Iterable[tuple[str, Tensor]]:
    """The tensors on the CPU in `dtype`, once each is known to be what the model needs."""
    with torch.device("meta"):
        missing = {fqn: tuple(p.shape) for fqn, p in Llama(config).named_parameters()}
    seen: set[str] = set()
    for fqn, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if fqn in seen:
            raise ValueError(f"{fqn} was given twice: pass each parameter once")
        if fqn not in missing:
            raise ValueError(f"the model has no parameter {fqn}: export with the config it had")
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
        seen.add(fqn)
        # A copy, because safetensors refuses tensors that share storage with others.
        yield fqn, tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
    if missing:
        some = ", ".join(list(missing)[:3])
        raise ValueError(
            f"{len(missing)} parameters are missing ({some}{', ...' if len(missing) > 3 else ''}): "
            "pass the full state dict of the model"
        )


class _ShardWriter:
    """Fills one shard after another; file names need their total, so they are given at the end."""

    def __init__(self, folder: Path, max_shard_nbytes: int) -> None:
        from safetensors.torch import save_file  # only an export needs it installed

        self._save_file = save_file
        self.folder, self.max_shard_nbytes = folder, max_shard_nbytes
        self.dtype = torch.float32
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._total_nbytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if not self._total_nbytes:
            self.dtype = tensor.dtype
        elif tensor.dtype != self.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype}, those before it are {self.dtype}: pass dtype= to cast"
            )
        if self._pending and self._pending_nbytes + tensor.nbytes > self.max_shard_nbytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_nbytes += tensor.nbytes
        self._total_nbytes += tensor.nbytes

    def _flush(self) -> None:
        self._save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_nbytes = {}, 0

    def _part(self, i: int) -> Path:
        return self.folder / f"part-{i}"

    def finish(self) -> None:
        self._flush()
        n = len(self._shards)
        if n == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
            self._part(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_nbytes}, "weight_map": weight_map}
        _write_json(self.folder / "model.safetensors.index.json", index)


def _write_json(file: Path, contents: dict[str, Any]) -> None:
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
