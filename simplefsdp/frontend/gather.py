"""The gather of one parameter and, as its backward, the reduce of its gradient.

Tensor vocabulary, used by every file:

- *shard*: the local tensor of the sharded DTensor, ``[rows_of_this_rank, ...]`` in the
  parameter's own dtype; dim 0 is split as ``torch.chunk`` does, so late ranks may hold fewer
  rows or none;
- *full*: the gathered tensor, ``[rows, ...]`` in ``param_dtype``, that the model computes with;
- *padded*: a shard or full gradient brought up to ``ranks * ceil(rows / ranks)`` rows, since a
  collective moves the same number of bytes on every rank.

Both directions call functional collectives on plain tensors, so the compiler sees cast, pad,
start, wait and slice as nodes of its own and can move each of them.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.fx import Node

from simplefsdp import provenance
from simplefsdp._torch import backend_traced_for, has_no_data, local_of, local_tensor
from simplefsdp.frontend import tensor_class
from simplefsdp.frontend.placement import off_the_wire, on_the_wire
from simplefsdp.rank_sequence import note_reduced

_collectives = torch.ops._c10d_functional
log = logging.getLogger("simplefsdp")
ON_META = (
    "is on the meta device, without values; call simplefsdp.init_weights(model) after simple_fsdp, "
    "or load a checkpoint"
)


class GatherSpec(NamedTuple):
    """How one parameter is gathered; constants only, so that a traced graph can hold them."""

    fqn: str  # fully qualified name of the parameter in the wrapped model
    rows: int  # size of dim 0 of the full tensor; 0 if it is not sharded
    shard_group: str  # name of the process group the shards are spread over; "" if not sharded
    shard_ranks: int  # number of ranks in ``shard_group``; 1 if not sharded
    reduce_group: str  # name of the process group, of the same ranks, that gradients are reduced in
    # (name, ranks) of each process group that holds copies of the shard.
    copy_groups: tuple[tuple[str, int], ...]
    # Dtype on the wire and in compute; None keeps the shard's dtype.
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None  # dtype of the reduce; None keeps the gradient's dtype
    averages: bool  # the backend can average by itself (NCCL); otherwise we sum and divide
    # What the sum of gradients over all ranks is divided by; None for their number.
    divide_factor: float | None
    # The compiler recomputes the gather in backward; ``"auto"`` until a planner has decided
    # (``reshard.py``).
    reshard_after_forward: bool | Literal["auto"]
    # What the parameter's class adds to its gather (``tensor_class.py``); "" for a plain tensor.
    tensor_class: str = ""

    def arguments(self) -> tuple[str, str]:
        """The spec as arguments of :func:`gather`: the FQN, and the other fields as one text.

        Dynamo guards each constant of each read: twelve fields would be twelve guards, to be made
        once and checked at every step.
        """
        return self.fqn, json.dumps(self[1:], default=lambda x: str(x).removeprefix("torch."))


@functools.cache
def _spec(fqn: str, fields: str) -> GatherSpec:
    spec = GatherSpec(fqn, *json.loads(fields))
    dtypes = (spec.param_dtype, spec.reduce_dtype)  # by name
    param_dtype, reduce_dtype = (None if x is None else getattr(torch, str(x)) for x in dtypes)
    return spec._replace(
        copy_groups=tuple((name, ranks) for name, ranks in spec.copy_groups),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )


def spec_of(node: Node) -> GatherSpec:
    """How a :func:`gather` in a Dynamo graph is done."""
    _, fqn, fields = node.args
    return _spec(str(fqn), str(fields))


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])


def padded_rows(spec: GatherSpec) -> int:
    """Rows of a shard with its padding."""
    return -(-spec.rows // spec.shard_ranks)


def gather_shard(shard: Tensor, spec: GatherSpec) -> Tensor:
    """The full parameter of which this rank has ``shard``; collective."""
    if spec.tensor_class:
        return _gather_as_class(shard, spec)
    if spec.param_dtype is not None and shard.is_floating_point():
        shard = shard.to(spec.param_dtype)
    if spec.shard_ranks == 1:
        # A view, because autograd does not let a custom function return its input unchanged.
        return shard.view_as(shard)
    full = _all_gather(_pad_rows(on_the_wire(shard), padded_rows(spec)), shard.dtype, spec)
    return full if full.shape[0] == spec.rows else full[: spec.rows]


def _all_gather(padded: Tensor, dtype: torch.dtype, spec: GatherSpec) -> Tensor:
    sent = _collectives.wait_tensor(
        _collectives.all_gather_into_tensor(padded.contiguous(), spec.shard_ranks, spec.shard_group)
    )
    return off_the_wire(sent, dtype)


def _gather_as_class(shard: Tensor, spec: GatherSpec) -> Tensor:
    """Gather as the parameter's class says (``tensor_class.py``)."""
    is_split = spec.shard_ranks > 1
    policy = MixedPrecisionPolicy(param_dtype=spec.param_dtype, reduce_dtype=spec.reduce_dtype)
    # Where nothing is sharded, it is the group that holds copies.
    group = spec.shard_group or next((name for name, _ in spec.copy_groups), "")
    sending = tensor_class.sending(
        shard.view_as(shard), spec.tensor_class, group, spec.shard_ranks, policy
    )
    with provenance.gather_of(spec.fqn, reshard_after_forward=spec.reshard_after_forward):
        outputs = sending.tensors
        if is_split:
            outputs = [_all_gather(on_the_wire(t), t.dtype, spec) for t in outputs]
        return sending.received(outputs)


class Deferral(NamedTuple):
    """How far a backward takes the gradient of one parameter, and what earlier ones left.

    Gradients that are not reduced yet are added up in tensors that graphs write to, so that it
    does not matter in which order forwards and backwards run. A backward that reduces a gradient
    further adds the sum of earlier ones to it, and leaves zeros there.
    """

    # ``"all"``: reduced over all ranks. ``"shards"``: within the group that the shards are spread
    # over, not over copies. ``"none"``: not sent.
    until: Literal["all", "shards", "none"] = "all"
    # Sum of gradients that were not sent, the shape of the gathered parameter.
    unreduced: Tensor | None = None
    # Sum of gradients reduced within the shard group only, the shape of a shard with its padding.
    partial: Tensor | None = None


def _reduce_grad(
    grad: Tensor, shard_rows: int, spec: GatherSpec, deferral: Deferral
) -> Tensor | None:
    """The gradient of the shard; None if it is deferred."""
    if spec.reduce_dtype is not None and grad.is_floating_point():
        grad = grad.to(spec.reduce_dtype)
    if deferral.until == "none":
        cast(Tensor, deferral.unreduced).add_(grad)
        return None
    part = _reduce_over_shards(_with_deferred(deferral.unreduced, grad), spec)
    if deferral.until == "shards":
        cast(Tensor, deferral.partial).add_(part)
        return None
    return _reduce_over_copies(_with_deferred(deferral.partial, part), shard_rows, spec)


def reduce_deferred(shard_rows: int, spec: GatherSpec, deferral: Deferral) -> Tensor:
    """The shard's gradient from what backwards have deferred, reduced over all; collective."""
    if deferral.unreduced is not None:
        nothing = torch.zeros_like(deferral.unreduced)
        return cast(Tensor, _reduce_grad(nothing, shard_rows, spec, deferral))
    partial = cast(Tensor, deferral.partial)
    part = _with_deferred(partial, torch.zeros_like(partial))
    return _reduce_over_copies(part, shard_rows, spec)


def _reduce_over_shards(grad: Tensor, spec: GatherSpec) -> Tensor:
    """This rank's part, with its padding, of the gradient reduced over the shard group."""
    if grad.is_complex():
        return torch.view_as_complex(_reduce_over_shards(on_the_wire(grad), spec))
    if _divides_first(grad, spec):
        grad = grad / _division(spec)
    if spec.shard_ranks == 1:
        return grad
    padded = _pad_rows(grad, padded_rows(spec) * spec.shard_ranks).contiguous()
    note_reduced(spec.shard_group, spec.fqn, padded)
    return _collectives.wait_tensor(
        _collectives.reduce_scatter_tensor(
            padded, _operation(spec), spec.shard_ranks, spec.reduce_group
        )
    )


def _reduce_over_copies(grad: Tensor, shard_rows: int, spec: GatherSpec) -> Tensor:
    if grad.is_complex():
        return torch.view_as_complex(_reduce_over_copies(on_the_wire(grad), shard_rows, spec))
    for group, _ in spec.copy_groups:
        note_reduced(group, spec.fqn, grad)
        grad = _collectives.wait_tensor(
            _collectives.all_reduce(grad.contiguous(), _operation(spec), group)
        )
    if spec.shard_ranks > 1 and grad.shape[0] != shard_rows:
        grad = grad[:shard_rows]
    factor = _division(spec)
    return grad if factor == 1 or _divides_first(grad, spec) else grad / factor


def _divides_first(grad: Tensor, spec: GatherSpec) -> bool:
    """Whether to divide before the sum: float16 overflows when many gradients are summed, and loses
    some small values by this. Wider dtypes are divided after, on the shard, which is less work."""
    return grad.dtype == torch.float16 and _division(spec) != 1


def _operation(spec: GatherSpec) -> str:
    return "avg" if spec.averages and spec.divide_factor is None else "sum"


def _division(spec: GatherSpec) -> float:
    """What we divide a sum over all data-parallel ranks by; 1 if the collectives average."""
    if spec.divide_factor is not None:
        return spec.divide_factor
    ranks = spec.shard_ranks * math.prod(ranks for _, ranks in spec.copy_groups)
    return 1 if spec.averages else ranks


def _with_deferred(sum_: Tensor | None, grad: Tensor) -> Tensor:
    if sum_ is None:
        return grad
    grad = sum_ + grad
    sum_.zero_()
    return grad


class _Gather(torch.autograd.Function):
    """One function for both directions, because the reduce may run in another dtype.

    Between two autograd nodes the engine casts a gradient to the dtype of the forward value
    (``param_dtype``); only inside one function can it go straight to ``reduce_dtype``.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, spec: GatherSpec, deferral: Deferral, kept: Tensor | None
    ) -> Tensor:
        ctx.spec = spec
        ctx.deferral = deferral  # not saved for backward: earlier backwards write to its tensors
        ctx.shard_rows = shard.shape[0] if shard.dim() else 0
        ctx.shard_dtype = shard.dtype
        return gather_shard(shard, spec) if kept is None else kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        with torch.no_grad(), provenance.reduce_of(ctx.spec.fqn):
            reduced = _reduce_grad(grad, ctx.shard_rows, ctx.spec, ctx.deferral)
            if reduced is None:
                return None, None, None, None
            reduced = reduced.to(ctx.shard_dtype)
        if torch.is_grad_enabled() and grad.requires_grad:
            reduced = _NotTwice.apply(reduced, grad, ctx.spec.fqn)
        return reduced, None, None, None


class _NotTwice(torch.autograd.Function):
    """A gradient that was made with ``create_graph=True``: to differentiate it once more raises."""

    @staticmethod
    def forward(ctx: Any, reduced: Tensor, grad: Tensor, fqn: str) -> Tensor:
        ctx.fqn = fqn
        return reduced.view_as(reduced)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ValueError(
            f"{ctx.fqn}: its gradient cannot be differentiated once more (create_graph=True), for "
            "the reduce over ranks has no backward; differentiate twice with respect to inputs "
            "only, or inside `with simplefsdp.unsharded(model):`, on each rank by itself"
        )


@functools.cache
def _warn_of_torchs_backend() -> None:
    log.warning(
        "a wrapped model is compiled by torch's backend: each parameter is gathered and reduced "
        'alone, and simplefsdp hides nothing; call model.compile(backend="simplefsdp")'
    )


@torch.compiler.allow_in_graph
def gather(
    param: DTensor, fqn: str, fields: str, *, kept: Tensor | None = None, **deferral: Any
) -> Tensor:
    """All-gather ``param`` and return the full plain tensor, ``[rows, ...]``.

    The gradient that flows back is averaged over all data-parallel ranks, unless that is deferred,
    and arrives as a DTensor shard in the parameter's own dtype. Dynamo takes the call as one node,
    which keeps its trace short; AOTAutograd traces through it.

    Args:
        param: the sharded parameter.
        fqn: with ``fields``, :meth:`GatherSpec.arguments`; so in a graph two reads of one parameter
            are two nodes with equal arguments. "" while Dynamo traces: by their names, layers that
            are alike would differ. The backend fills it in (``dedupe.py``).
        fields: the same for all parameters that are gathered alike.
        kept: the full parameter, if it was gathered before and kept (``kept.py``).
        deferral: fields of a :class:`Deferral`; none if no gradient is, or was, deferred.
    """
    spec = _spec(fqn, fields)
    if not isinstance(param, DTensor):
        raise TypeError(
            f"{fqn or 'a parameter'}: expected the sharded DTensor, got {type(param).__name__}: it "
            "is read in a control-flow branch (torch.cond, say); read it before, and pass it in"
        )
    if param.is_meta:
        # Here, not where the parameter is read: Dynamo would take the code that it traces to be
        # uncompilable, for ever.
        raise ValueError(f"{fqn or 'a parameter'}: {ON_META}")
    if has_no_data(local_tensor(param)) and backend_traced_for() == "inductor":
        _warn_of_torchs_backend()
    marked = provenance.gather_of(fqn, reshard_after_forward=spec.reshard_after_forward)
    with nullcontext() if spec.tensor_class else marked:  # a class's gather is marked further in
        try:
            return _Gather.apply(local_of(param), spec, Deferral(**deferral), kept)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "functorch" in str(error):
                raise ValueError(
                    f"{fqn}: a sharded parameter cannot be gathered inside a transform of "
                    "torch.func (grad, jvp, vmap, ...): in forward read it before, `weight = "
                    "self.weight`, and transform a function that uses it; else use "
                    "torch.autograd.grad, or transform inside `with simplefsdp.unsharded(model):`, "
                    "on each rank by itself"
                ) from error
            error.add_note(
                f"{fqn} was being gathered. If ranks lost each other there: one has ended, "
                "is late, or took another branch of the program; see their logs"
            )
            raise
