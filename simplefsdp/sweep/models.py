"""Models that are swept: how they are built, and what they are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp.extrapolate_depth import SHALLOW
from simplefsdp.models.build import WithLoss, llama_with_loss, model_config, wrap
from simplefsdp.models.configs import flops_per_token
from simplefsdp.models.options import ModelOptions, ParallelOptions


@dataclass(frozen=True)
class SweptModel:
    """A model of any batch and sequence.

    Attributes:
        name: for messages.
        build: the wrapped model, on meta, of a number of layers, over a mesh; its output is the
            loss.
        inputs: on one rank, for a batch and a sequence; either may be a ``torch.SymInt``.
        layers: FQN of the list of its layers.
        depth: how many there are.
        longest: sequence that it takes; None if there is no limit.
        flops_per_token: of a step, by the sequence; None if it is not known.
        open_sizes: which of ``batch`` and ``seq`` its inputs have.
    """

    name: str
    build: Callable[[int, DeviceMesh], nn.Module]
    inputs: Callable[[Any, Any], tuple[Any, ...]]
    layers: str
    depth: int
    longest: int | None = None
    flops_per_token: Callable[[int], float] | None = None
    open_sizes: tuple[str, ...] = ("batch", "seq")


def swept_llama(
    options: ModelOptions, parallel: ParallelOptions, layers: int | None = None
) -> SweptModel:
    """One of our models, with all of its layers or so many.

    Raises:
        ValueError: there is no such model.
    """
    config = model_config(options)
    config = replace(config, n_layers=layers or config.n_layers)

    def build(depth: int, mesh: DeviceMesh) -> nn.Module:
        return llama_with_loss(options, parallel, mesh, depth)

    return SweptModel(
        options.config,
        build,
        tokens_and_targets,
        "layers",
        config.n_layers,
        config.max_seq_len,
        lambda seq: flops_per_token(config, seq),
    )


def tokens_and_targets(batch: Any, seq: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``[batch, seq]``, int64, twice."""
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return tokens, tokens


def swept_target(
    name: str,
    build: Callable[[DeviceMesh], nn.Module],
    example: Callable[[], tuple[Any, ...]],
) -> SweptModel:
    """A user's model.

    Dimension 0 of its inputs is the batch. If one of them is tokens, integers ``[batch, seq]``, so
    is dimension 1 of all inputs that are as long.

    Args:
        name: for messages.
        build: the wrapped model, over a mesh of all ranks.
        example: what it is called with on a rank: tensors, and other things as they are.
    """
    made = example()
    tokens = next((x for x in made if _is_tokens(x)), None)

    def opened(x: Any, batch: Any, seq: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.ndim:
            return x
        shape = [batch, *x.shape[1:]]
        if tokens is not None and x.ndim > 1 and x.shape[:2] == tokens.shape:
            shape[1] = seq
        return torch.zeros(shape, dtype=x.dtype, requires_grad=x.requires_grad)

    return SweptModel(
        name,
        lambda _, mesh: build(mesh),
        lambda batch, seq: tuple(opened(x, batch, seq) for x in made),
        layers="",
        depth=1,
        open_sizes=("batch",) if tokens is None else ("batch", "seq"),
    )


def _is_tokens(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 2 and x.dtype in (torch.int32, torch.int64)


def swept_transformers(
    path: Path, options: ModelOptions, parallel: ParallelOptions, layers: int | None = None
) -> SweptModel:
    """A causal language model of transformers, from its configuration alone.

    Args:
        path: a ``config.json``, or the folder that it is in.
        options: what of it is recomputed: whole layers, or nothing.
        parallel: how it is spread over the ranks, without tensor parallelism.
        layers: so many, instead of all.

    Raises:
        ValueError: there is no such file, it is of no causal language model, or what is asked for
            cannot be had.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if options.activation_checkpointing == "selective":
        raise ValueError(
            "--activation-checkpointing selective: models of transformers recompute whole layers "
            "or nothing; give full or none"
        )
    if parallel.tp > 1:
        raise ValueError(
            f"--tp {parallel.tp}: not with --hf; use --target for a model that is split"
        )
    if not path.exists():
        raise ValueError(f"--hf {path}: there is no such file or folder")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        all_layers = int(config.num_hidden_layers)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"--hf {path}: no configuration of a language model: {error}") from error

    def build(depth: int, mesh: DeviceMesh) -> nn.Module:
        its = copy.deepcopy(config)
        its.num_hidden_layers = depth
        if getattr(its, "layer_types", None):
            its.layer_types = its.layer_types[:depth]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(its)
        if options.activation_checkpointing == "full":
            _checkpoint_layers(model)
        return WithLoss(wrap(_Logits(model), parallel, mesh))

    depth = layers or all_layers
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    alike = _are_alike(whole, getattr(config, "layer_types", None), depth)
    return SweptModel(
        str(getattr(config, "name_or_path", "") or path),
        build if alike else lambda _, mesh: build(depth, mesh),
        tokens_and_targets,
        "model.model.layers" if alike else "",
        depth if alike else 1,
        getattr(config, "max_position_embeddings", None),
    )


def _are_alike(model: nn.Module, types: Sequence[str] | None, depth: int) -> bool:
    """Whether the layers that need not be traced are like that which stands for them."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or len(layers) < depth:
        return False
    kinds = {
        (types[i] if types else "", *((name, p.shape) for name, p in layer.named_parameters()))
        for i, layer in enumerate(layers[:depth])
        if i >= SHALLOW // 2
    }
    return len(kinds) <= 1


def _checkpoint_layers(model: nn.Module) -> None:
    """By transformers' own method: its name changed in 5.x."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})  # type: ignore[operator]


class _Logits(nn.Module):
    """What a model of transformers makes of tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits  # type: ignore[no-any-return]
