"""The variants that are compared: one model, one batch, and each way to distribute it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from cluster_here import cluster_here
from rows import Row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch_passes import auto_backend, manual_backend

from inductor_passes.rehearsal import Settings
from simplefsdp import simple_fsdp
from simplefsdp.compiler.backend import simplefsdp
from simplefsdp.frontend.control import change_specs
from simplefsdp.models.llama3 import Llama


class LlamaLoss(Llama):
    """The Llama with its loss, so that a compiled model is a whole forward and backward."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets [batch, seq]` given `tokens [batch, seq]`."""
        return cross_entropy(super().forward(tokens), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in fp32: `logits [batch, seq, vocab]`, `targets [batch, seq]`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LlamaCompiledLoss(Llama):
    """For FSDP2 with compiled blocks: what is outside the blocks is eager, the loss compiled."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As :class:`LlamaLoss`."""
        return _compiled_cross_entropy()(super().forward(tokens), targets)


@functools.cache
def _compiled_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(cross_entropy)


def _with_own_code(cls: type[Llama]) -> type[Llama]:
    """A subclass whose forward is a code object of its own.

    Dynamo caches by code object: DDP's model would be served the graph that the floor compiled,
    which is not split at DDP's buckets, and would overlap nothing.
    """
    shared = cls.forward
    own = types.FunctionType(
        shared.__code__.replace(), shared.__globals__, "forward", closure=shared.__closure__
    )
    return type(cls.__name__, (cls,), {"forward": own})


# Of what users do not choose.
Adjust = Callable[[Settings], Settings]


@dataclass
class Workload:
    """What every variant runs: same weights, same batch."""

    row: Row
    mesh: DeviceMesh
    device: torch.device
    weights: dict[str, Tensor]
    tokens: Tensor
    targets: Tensor

    def model(self, cls: type[Llama] = LlamaLoss) -> Llama:
        """A fresh model with the weights, fp32, on the device."""
        with self.device:  # a GPU draws the values that are written over in no time
            model = _with_own_code(cls)(self.row.config())
        model.load_state_dict(self.weights)
        return model.to(self.device)

    def policy(self) -> MixedPrecisionPolicy:
        """The one mixed-precision policy of all sharded variants."""
        if self.row.dtype == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Variant:
    """One way to run a step.

    Attributes:
        name: as on the command line.
        step: forward of the loss; `.backward()` is the caller's.
        model: what `step` calls, before it was compiled.
        params: what the optimizer steps.
        optimizer: AdamW over `params`.
        extra_nbytes: held through the run, and neither parameter, gradient nor optimizer state.
    """

    name: str
    step: Callable[[Tensor, Tensor], Tensor]
    params: dict[str, nn.Parameter]
    model: nn.Module
    extra_nbytes: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=1e-4)

    @property
    def is_sharded(self) -> bool:
        """Whether its parameters are DTensor shards."""
        return any(isinstance(p, DTensor) for p in self.params.values())


def _floor(load: Workload) -> Variant:
    """No communication: the plain model, compiled; its parameters are in the compute dtype."""
    model = load.model().to(load.row.param_dtype)
    return Variant("floor", torch.compile(model), dict(model.named_parameters()), model)


def _ddp(load: Workload) -> Variant:
    """DDP, compiled; gradients travel in the compute dtype."""
    model = load.model().to(load.row.param_dtype)
    params = dict(model.named_parameters())
    # Its gradient buckets are a second copy of all gradients, made once.
    extra = sum(p.numel() * p.element_size() for p in params.values())
    # The only buffers are the rotary tables; nobody would broadcast them in every step.
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    return Variant("ddp", torch.compile(ddp), params, ddp, extra)


def cast_recomputed_inputs(layers: Iterable[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Have FSDP2 cast the inputs of checkpointed layers in backward as it does in forward.

    Before 2.13 it does not, and torch refuses what is recomputed: it is of another dtype.
    """

    def cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(value.to(policy.param_dtype) for value in inputs)

    if torch.__version__ < "2.13" and policy.param_dtype is not None:
        for layer in layers:
            layer.register_forward_pre_hook(cast)


def _fsdp2(load: Workload, *, compiled: bool) -> Variant:
    """FSDP2, a unit each for the embedding, the blocks, and norm with head; compiled by block."""
    model = load.model(LlamaCompiledLoss if compiled else LlamaLoss)
    if compiled:
        for layer in model.layers:
            layer.compile()
    units = (model.embed_tokens, *model.layers, [model.norm, model.lm_head], model)
    for unit in units:
        fully_shard(unit, mesh=load.mesh, mp_policy=load.policy(), reshard_after_forward=True)
    cast_recomputed_inputs(model.layers, load.policy())
    name = "fsdp2_compiled" if compiled else "fsdp2_eager"
    return Variant(name, model, dict(model.named_parameters()), model)


def _wrapped(load: Workload, reshard: bool | Literal["auto"] = True) -> nn.Module:
    model = simple_fsdp(
        load.model(),
        load.mesh,
        mode="fully_shard" if load.mesh.ndim == 1 else "hybrid_shard",
        mp_policy=load.policy(),
        reshard_after_forward=reshard,
    )
    if load.device.type == "cuda":  # the wire stands for NCCL, which averages; FSDP2 has it do so
        change_specs(model.modules(), {"averages": True})
    return model


def _simplefsdp(
    load: Workload,
    *,
    name: str,
    options: dict[str, object],
    adjust: Adjust | None = None,
    reshard: bool | Literal["auto"] = True,
) -> Variant:
    model = _wrapped(load, reshard)
    options = {"executor": "inductor", **options}  # unless by regions, however many layers
    backend = functools.partial(simplefsdp, options=options, adjust=adjust)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return Variant(name, compiled, dict(model.named_parameters()), model)


def _auto(
    load: Workload,
    *,
    name: str = "auto",
    adjust: Adjust | None = None,
    reshard: bool | Literal["auto"] = True,
    **options: object,
) -> Variant:
    """Planned for this machine and this wire."""
    options = {"bucketing": "auto", "cluster": cluster_here(load.row, load.device), **options}
    return _simplefsdp(load, name=name, options=options, adjust=adjust, reshard=reshard)


def _greedily(settings: Settings) -> Settings:
    """The published rule instead of the planner."""
    assert settings.auto is not None
    return replace(settings, auto=replace(settings.auto, planner="greedy"))


def _torch_manual(load: Workload) -> Variant:
    """PyTorch's manual pass on the wrapped model, buckets as for FSDP2."""
    model = _wrapped(load)
    plan = ["embed_tokens", *(f"layers.{i}" for i in range(load.row.layers)), ["norm", "lm_head"]]
    compiled = torch.compile(model, backend=manual_backend(plan), fullgraph=True)
    return Variant("torch_manual", compiled, dict(model.named_parameters()), model)


def _torch_auto(load: Workload) -> Variant:
    """PyTorch's automatic pass on the wrapped model."""
    model = _wrapped(load)
    compiled = torch.compile(model, backend=auto_backend(), fullgraph=True)
    return Variant("torch_auto", compiled, dict(model.named_parameters()), model)


def _options(
    name: str, adjust: Adjust | None = None, **options: object
) -> Callable[[Workload], Variant]:
    return functools.partial(_simplefsdp, name=name, options=options, adjust=adjust)


BUILDERS: dict[str, Callable[[Workload], Variant]] = {
    "floor": _floor,
    "ddp": _ddp,
    "fsdp2_eager": functools.partial(_fsdp2, compiled=False),
    "fsdp2_compiled": functools.partial(_fsdp2, compiled=True),
    "none": _options("none", bucketing="none"),
    "manual": _options("manual", bucketing="manual"),
    "auto": _auto,
    "torch_manual": _torch_manual,
    "torch_auto": _torch_auto,
    # Buckets by name: a smaller first gather and last reduce, as the exposed ones.
    "manual_split": _options(
        "manual_split",
        bucketing="manual",
        buckets=["layers.0.self_attn", "layers.0", "layers.*"],
    ),
    # Not in the default list: for choosing the defaults.
    "manual_regions": _options("manual_regions", bucketing="manual", executor="regions"),
    "auto_regions": functools.partial(_auto, name="auto_regions", executor="regions"),
    "auto_keeps": functools.partial(_auto, name="auto_keeps", reshard="auto"),
    "auto_cudagraphs": functools.partial(_auto, name="auto_cudagraphs", cudagraphs=True),  # CUDA
    "greedy": functools.partial(_auto, name="greedy", adjust=_greedily),
    "none_reorder": _options("none_reorder", bucketing="none", reorder=True),
    "manual_flat": _options(
        "manual_flat", lambda settings: replace(settings, layout="flat"), bucketing="manual"
    ),
}
DEFAULT = tuple(BUILDERS)[:10]
