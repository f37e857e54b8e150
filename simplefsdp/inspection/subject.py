"""The subject of an inspection: a model of ours or of the user's, traced as on one of many ranks.

Call these functions inside a (fake) process group.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException, Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.launcher.errors import UserError
from simplefsdp.models import config_of, flops_per_token
from simplefsdp.models.build import llama_with_loss
from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.simulation.extrapolate_depth import trace_deep
from simplefsdp.simulation.trace import TracedStep, UntraceableError, trace


@dataclass(frozen=True)
class Subject:
    """A traced step, and what else its report needs."""

    name: str  # for messages
    step: TracedStep
    parameters_nbytes: int  # bytes of this rank's shards
    # Tokens of a rank's batch, with tensor parallelism its share; None if the input is no tokens.
    tokens: float | None
    # Operations of the model for these tokens; None if its configuration is not known.
    flops: float | None


def trace_llama(
    options: ModelOptions,
    parallel: ParallelOptions,
    mesh: DeviceMesh,
    *,
    layers: int | None,
    seq_len: int,
    batch_size: int,
    averages: bool,
) -> Subject:
    """Trace a step of one of our models with its loss: ``seq_len`` tokens per sequence and
    ``batch_size`` sequences per rank. ``layers`` is the number of layers, None for all of them;
    ``averages`` says whether reduce collectives of the machine can average.

    Raises:
        ValueError: there is no such model, or the sequence is too long for it.
    """
    config = config_of(options.model, layers)
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len {seq_len} is longer than --model {options.model} takes "
            f"({config.max_seq_len})"
        )

    def traced(depth: int) -> tuple[TracedStep, nn.Module]:
        model = llama_with_loss(options, parallel, mesh, depth)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
            return trace(model, tokens, tokens, averages=averages), model.model

    step, nbytes = trace_deep(traced, "layers", config.n_layers)
    tokens = seq_len * batch_size / parallel.tp  # tensor-parallel ranks work on the same tokens
    flops = tokens * flops_per_token(config, seq_len)
    return Subject(options.model, step, nbytes, tokens, flops)


class Target:
    """A model of the user's, and its inputs: two functions, each given as ``module:function``.

    ``build`` returns the wrapped model; it is called with a mesh of all ranks if it takes an
    argument. ``inputs`` returns the inputs of one rank: a tensor, a tuple, or a mapping of keyword
    arguments. If either cannot be imported or fails, a UserError names the option.
    """

    def __init__(self, build: str, inputs: str) -> None:
        self.name, self._example = build, inputs
        self._build, self._inputs = _load("--target", build), _load("--input", inputs)

    def build(self, mesh: DeviceMesh) -> nn.Module:
        """The wrapped model."""
        wants_mesh = any(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in inspect.signature(self._build).parameters.values()
        )
        model = _called("--target", self.name, self._build, *([mesh] if wants_mesh else []))
        if not isinstance(model, nn.Module):
            raise UserError(
                f"--target {self.name} returned {type(model).__name__}; it must return the wrapped "
                "model, an nn.Module"
            )
        return model

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments with which the model is called."""
        made = _called("--input", self._example, self._inputs)
        if isinstance(made, Mapping):
            return (), dict(made)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,), {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, errors that say why the model cannot be traced become UserErrors of one line."""
        try:
            yield
        except Unsupported as error:
            raise UserError(f"--target {self.name}: {_graph_break(error)}") from error
        except TorchDynamoException as error:
            text = " ".join(str(error).split("\n\n", maxsplit=1)[0].split())
            raise UserError(
                f"--target {self.name}: forward failed with what --input {self._example} returned: "
                f"{text[:1000]}"
            ) from error
        except UntraceableError as error:
            raise UserError(f"--target {self.name}: {error}") from error


def trace_target(target: Target, ranks: int, *, averages: bool) -> Subject:
    """Trace a step of the user's model on ``ranks`` ranks. ``averages`` says whether reduce
    collectives of the machine can average. Tensors that the user's function makes without naming a
    device are on meta.

    Raises:
        UserError: a function fails, the model is not wrapped, or its forward is not one graph.
    """
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = target.build(mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device="cpu")
        inputs, keywords = target.inputs()
        with target.tracing():
            step = trace(model, *inputs, keywords=keywords, averages=averages)
    first = next((x for x in (*inputs, *keywords.values()) if isinstance(x, Tensor)), None)
    is_tokens = first is not None and first.ndim == 2 and not first.is_floating_point()
    tokens = first.numel() if first is not None and is_tokens else None
    return Subject(target.name, step, local_nbytes(model.parameters()), tokens, None)


def _load(option: str, path: str) -> Callable[..., Any]:
    """Import ``module:function``; the working directory is searched, too."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise UserError(
            f"{option} {path}: expected module:function, as in my_package.my_module:build_model"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = f"; {folder} and the installed packages were searched"
        raise UserError(f"{option} {path}: cannot import {name}: {error}{hint}") from error
    except Exception as error:
        raise UserError(f"{option} {path}: importing {name} failed: {_told(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = inspect.getmembers(module, inspect.isfunction)
        functions = [n for n, f in found if f.__module__ == name and n[0] != "_"]
        has = f"its functions are {', '.join(functions)}" if functions else "it has no functions"
        raise UserError(f"{option} {path}: {name} has no function {attribute}; {has}")
    return function


def _called(option: str, path: str, function: Callable[..., Any], *args: object) -> Any:
    """Call a user's function; an error in it becomes a UserError."""
    try:
        return function(*args)
    except Exception as error:
        raise UserError(f"{option} {path} failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]} ({frame.filename}:{frame.lineno})"


def _graph_break(error: Unsupported) -> str:
    """The message for a graph break: Dynamo's reason without its hints, and the user's line."""
    reason = str(error).split("Hint:", maxsplit=1)[0].split("\n\n", maxsplit=1)[0]
    stack: Sequence[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    where = f" at {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].line})" if stack else ""
    return (
        f"graph break{where}: the whole model must be one graph. Change that line, or inspect the "
        f"part of the model without it. Dynamo's reason: {' '.join(reason.split())}"
    )
