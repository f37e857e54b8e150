"""The models of a sweep: how to build them, and their inputs."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.ir.json_file import MIB, read_json, shown, typed
from simplefsdp.models.build import WithLoss, llama_with_loss, wrap
from simplefsdp.models.configs import config_of, flops_per_token
from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.simulation.extrapolate_depth import SHALLOW

_MAX_NBYTES = 16 * MIB


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class SweptModel:
    """A model that can be traced for any batch and sequence."""

    name: str  # for messages
    # Gives the wrapped model, on meta, for a number of layers and a mesh; its output is the loss.
    build: Callable[[int, DeviceMesh], nn.Module]
    # Gives the inputs of one rank, positional and by name, for a batch and a sequence, either of
    # which may be a SymInt.
    inputs: Callable[[Any, Any], Inputs]
    layers: str  # FQN of the list of its layers
    depth: int  # number of its layers
    longest: int | None = None  # longest sequence that it takes; None if there is no limit
    # Operations of a step per token, for a sequence length; None if not known.
    flops_per_token: Callable[[int], float] | None = None
    open_sizes: tuple[str, ...] = ("batch", "seq")  # the sizes that its inputs have
    # A context for tracing it, in which errors say in the user's terms why it cannot be traced.
    tracing: Callable[[], AbstractContextManager[None]] = nullcontext


def swept_llama(
    options: ModelOptions, parallel: ParallelOptions, layers: int | None = None
) -> SweptModel:
    """One of our models, with ``layers`` layers; None for all of them.

    Raises:
        ValueError: there is no such model.
    """
    config = config_of(options.model, layers)
    return SweptModel(
        options.model,
        lambda depth, mesh: llama_with_loss(options, parallel, mesh, depth),
        tokens_and_targets,
        "layers",
        config.n_layers,
        config.max_seq_len,
        lambda seq: flops_per_token(config, seq),
    )


def tokens_and_targets(batch: Any, seq: Any) -> Inputs:
    """Tokens and targets, both int64 ``[batch, seq]``."""
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return (tokens, tokens), {}


def swept_target(
    name: str,
    build: Callable[[DeviceMesh], nn.Module],
    example: Callable[[], Inputs],
) -> SweptModel:
    """A user's model.

    The first input with integers ``[batch, seq]``, the tokens, tells the batch and the sequence of
    the example. If there is none, dimension 0 of the first tensor is the batch, and there is no
    sequence. In every input, dimension 0 is open if it is as long as the batch, and any dimension
    is open if it is as long as the sequence; other dimensions are constant. So position ids
    ``[seq]`` and masks ``[batch, 1, seq, seq]`` grow with the sizes, but class weights
    ``[classes]`` do not. A dimension that has the same length by chance is mistaken for one of
    these, so the example's batch and sequence should differ from all other sizes.

    Raises:
        ValueError: the example has no batch, or its sequence is as long as its batch, or 1.
    """
    made, by_name = example()
    tensors = [x for x in (*made, *by_name.values()) if isinstance(x, torch.Tensor) and x.ndim > 0]
    integers = (torch.int32, torch.int64)
    tokens = next((x for x in tensors if x.ndim == 2 and x.dtype in integers), None)
    batched = tokens if tokens is not None else next(iter(tensors), None)
    if batched is None:
        raise ValueError("--input: it returned no tensor with dimensions, so there is no batch")
    its_batch = batched.shape[0]
    its_seq = None if tokens is None else tokens.shape[1]
    if its_seq in (its_batch, 1):
        raise ValueError(
            f"--input: tokens of batch {its_batch} and sequence {its_seq} do not tell which other "
            "dimensions are the sequence; return longer ones, and a batch that is not as long"
        )

    def inputs(batch: Any, seq: Any) -> Inputs:
        named = {name: opened(x, batch, seq) for name, x in by_name.items()}
        return tuple(opened(x, batch, seq) for x in made), named

    def opened(x: Any, batch: Any, seq: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        shape = [seq if n == its_seq else n for n in x.shape]
        if x.ndim and x.shape[0] == its_batch:
            shape[0] = batch
        return torch.zeros(shape, dtype=x.dtype, requires_grad=x.requires_grad)

    return SweptModel(
        name,
        lambda _, mesh: build(mesh),
        inputs,
        layers="",
        depth=1,
        open_sizes=("batch",) if tokens is None else ("batch", "seq"),
    )


def swept_transformers(
    path: Path, options: ModelOptions, parallel: ParallelOptions, layers: int | None = None
) -> SweptModel:
    """A causal language model of transformers, made from its configuration alone: ``path`` is a
    ``config.json`` or the folder that has it. ``layers`` is the number of layers, None for all.

    Raises:
        ValueError: there is no such file; it is not the configuration of a causal language model of
            transformers; the options are not supported for such a model; or there is no
            transformers.
    """
    _check_swept(path, options, parallel)
    from transformers import AutoModelForCausalLM

    config, whole = _configured(path)
    depth = layers or config.num_hidden_layers
    if depth > config.num_hidden_layers:
        raise ValueError(
            f"--layers {layers}: --hf {path} has {config.num_hidden_layers}, and what kind further "
            "ones would be it does not tell; give as many at most"
        )

    def build(depth: int, mesh: DeviceMesh) -> nn.Module:
        its = copy.deepcopy(config)
        its.num_hidden_layers = depth
        if getattr(its, "layer_types", None):
            its.layer_types = its.layer_types[:depth]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(its, trust_remote_code=False)
        if options.activation_checkpointing == "full":
            # transformers' own method, whose name changed in 5.x.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return WithLoss(wrap(_Logits(model), parallel, mesh))

    alike = _are_alike(whole, getattr(config, "layer_types", None), depth)
    return SweptModel(
        str(getattr(config, "name_or_path", "") or path),
        build if alike else lambda _, mesh: build(depth, mesh),
        tokens_and_targets,
        "model.model.layers" if alike else "",
        depth if alike else 1,
        getattr(config, "max_position_embeddings", None),
    )


def _check_swept(path: Path, options: ModelOptions, parallel: ParallelOptions) -> None:
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
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--hf {path}: needs transformers: pip install transformers")


def _configured(path: Path) -> tuple[Any, nn.Module]:
    """The configuration in a file or folder, and the model that it describes, on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        read_json(path / "config.json" if path.is_dir() else path, _MAX_NBYTES)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _check_count(config, "num_hidden_layers", 1)
        if getattr(config, "max_position_embeddings", None) is not None:
            _check_count(config, "max_position_embeddings", 2)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for a bad configuration
        text = " ".join(str(error).split())
        raise ValueError(
            f"--hf {path}: no configuration of a language model that transformers has by itself: "
            f"{type(error).__name__}: {text[:500]}. Mend the file; for a model with code of its "
            "own, use --target"
        ) from error
    return config, model


def _check_count(config: Any, name: str, least: int) -> None:
    value = getattr(config, name, None)
    if typed(value, int, name) < least:
        raise ValueError(f"{name}: expected at least {least}, got {shown(value)}")


def _are_alike(model: nn.Module, types: Sequence[str] | None, depth: int) -> bool:
    """Whether the layers that are not to be traced are like the one that stands for them."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or len(layers) < depth:
        return False
    kinds = {
        (types[i] if types else "", *((name, p.shape) for name, p in layer.named_parameters()))
        for i, layer in enumerate(layers[:depth])
        if i >= SHALLOW // 2
    }
    return len(kinds) <= 1


class _Logits(nn.Module):
    """Gives the logits of a model of transformers for tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits
