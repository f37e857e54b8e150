"""The cells of the grid of ``scale.py``: a model on so many ranks, and its step, traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from variants import LlamaLoss

from simplefsdp import simple_fsdp
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models import CONFIGS, LlamaConfig
from simplefsdp.models.configs import flops_per_token
from simplefsdp.models.options import ActivationCheckpointing
from simplefsdp.models.tensor_parallel import apply_tensor_parallel
from simplefsdp.simulation.extrapolate_depth import trace_deep
from simplefsdp.simulation.trace import TracedStep, trace

LayoutName = Literal["shard", "hybrid", "tp"]
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
NODE, TP, SEQ_LEN = 8, 8, 8192
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Made = TypeVar("Made")


@dataclass(frozen=True)
class Cell:
    """What is trained on how many ranks.

    Attributes:
        model: a name in :data:`simplefsdp.models.CONFIGS`.
        ranks: in all.
        batch: sequences per data-parallel rank.
        layout: ``"shard"`` over all ranks; ``"hybrid"``: shards within a node of 8, copies across;
            ``"tp"``: tensor parallelism within a node of 8, shards across.
        checkpointing: of the model's layers.
        layers: fewer than the model has, to debug.
        seq_len: tokens per sequence.
    """

    model: str
    ranks: int
    batch: int
    layout: LayoutName = "shard"
    checkpointing: ActivationCheckpointing = "full"
    layers: int | None = None
    seq_len: int = SEQ_LEN

    @property
    def config(self) -> LlamaConfig:
        """The model's hyper-parameters; its rotary tables end with the sequence."""
        config = replace(CONFIGS[self.model], max_seq_len=self.seq_len)
        return config if self.layers is None else replace(config, n_layers=self.layers)

    @property
    def tokens(self) -> float:
        """Tokens of one step, per GPU: the ranks that split a layer share theirs."""
        return self.batch * self.seq_len / (TP if self.layout == "tp" else 1)

    @property
    def flops(self) -> float:
        """What the model needs for them."""
        return self.tokens * flops_per_token(self.config, self.seq_len)

    def __str__(self) -> str:
        checkpointing = "" if self.checkpointing == "full" else f", {self.checkpointing} AC"
        return f"{self.model} on {self.ranks} ({self.layout}), batch {self.batch}{checkpointing}"


def makes_sense(model: str, ranks: int, layout: LayoutName) -> bool:
    """Whether anybody would lay ``model`` out like this.

    Copies need two nodes, and 405B's shards and optimizer state fit no eight devices. Tensor
    parallelism leaves data parallelism nothing to do on one node, and 8B has no need of it.
    """
    if layout == "hybrid":
        return ranks > NODE and model != "405b"
    return layout == "shard" or (ranks > TP and model != "8b")


@contextmanager
def rank_of(cell: Cell) -> Iterator[DeviceMesh]:
    """Be one of the cell's ranks, in a fake process group; yields the mesh of all."""
    # Deep graphs are walked recursively, by AOTAutograd and by autograd's own hooks.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    with fake_ranks(cell.ranks):
        if cell.layout == "hybrid":
            shape, names = (cell.ranks // NODE, NODE), ("replicate", "shard")
        elif cell.layout == "tp":
            shape, names = (cell.ranks // TP, TP), ("dp", "tp")
        else:
            shape, names = (cell.ranks,), ("dp",)  # type: ignore[assignment]
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


def in_fake_model(
    cell: Cell,
    mesh: DeviceMesh,
    wrap: Callable[[LlamaLoss], nn.Module],
    run: Callable[[nn.Module], Made],
) -> Made:
    """``run(model)`` of a model of fake tensors, split over ``tp`` if the cell has it, and wrapped.

    It is wrapped on meta: meshes compute with tensors of their own, which must not be fake.
    """
    with torch.device("meta"):
        model = LlamaLoss(cell.config, activation_checkpointing=cell.checkpointing)
    if cell.layout == "tp":
        apply_tensor_parallel(model, mesh["tp"])
    wrapped = wrap(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return run(wrapped.to_empty(device="cpu"))


def tokens_and_targets(cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the model, of any values; call it in a fake mode."""
    tokens = torch.zeros(cell.batch, cell.seq_len, dtype=torch.long)
    return tokens, tokens.clone()


def data_parallel_mesh(cell: Cell, mesh: DeviceMesh) -> DeviceMesh:
    """The part of ``mesh`` that parameters are sharded over."""
    return mesh["dp"] if cell.layout == "tp" else mesh


def traced_step(cell: Cell, mesh: DeviceMesh) -> tuple[TracedStep, int]:
    """The graphs of the step of the wrapped model, and bytes of this rank's fp32 shards."""

    def wrap(model: LlamaLoss) -> nn.Module:
        mode = "hybrid_shard" if cell.layout == "hybrid" else "fully_shard"
        return simple_fsdp(model, data_parallel_mesh(cell, mesh), mode=mode, mp_policy=POLICY)

    def run(model: nn.Module) -> tuple[TracedStep, nn.Module]:
        return trace(model, *tokens_and_targets(cell), averages=True), model

    def traced(depth: int) -> tuple[TracedStep, nn.Module]:
        torch._dynamo.reset()
        return in_fake_model(replace(cell, layers=depth), mesh, wrap, run)

    return trace_deep(traced, "layers", cell.config.n_layers)
