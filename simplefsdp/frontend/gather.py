"""The gather of one parameter and, as its backward, the reduce of its gradient.

The words for tensors are in ``gather_spec.py``.

Both directions call functional collectives on plain tensors, so the compiler sees cast, pad,
start, wait and slice as nodes of its own and can move each of them.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from simplefsdp import provenance
from simplefsdp._torch import (
    has_no_data,
    is_traced_tensor,
    local_of,
    local_tensor,
    traces_for,
)
from simplefsdp.frontend import tensor_class
from simplefsdp.frontend.gather_spec import (
    GatherSpec,
    pad_rows,
    padded_rows,
    rows_first,
    rows_in_place,
    spec_from,
)
from simplefsdp.frontend.placement import off_the_wire, on_the_wire
from simplefsdp.frontend.reduce import Deferral, reduce_grad

_collectives = torch.ops._c10d_functional
log = logging.getLogger("simplefsdp")
ON_META = (
    "is on the meta device, without values; call simplefsdp.init_weights(model) after simple_fsdp, "
    "or load a checkpoint"
)


def gather_shard(shard: Tensor, spec: GatherSpec) -> Tensor:
    """The full parameter of which this rank has ``shard``; collective."""
    if spec.tensor_class:
        return _gather_as_class(shard, spec)
    if spec.param_dtype is not None and shard.is_floating_point():
        shard = shard.to(spec.param_dtype)
    if spec.shard_ranks == 1:
        # A view, because autograd does not let a custom function return its input unchanged.
        return shard.view_as(shard)
    sent = pad_rows(on_the_wire(rows_first(shard, spec)), padded_rows(spec))
    full = _all_gather(sent, shard.dtype, spec)
    return rows_in_place(full if full.shape[0] == spec.rows else full[: spec.rows], spec)


def _all_gather(padded: Tensor, dtype: torch.dtype, spec: GatherSpec) -> Tensor:
    sent = _all_of(padded.contiguous(), spec.shard_ranks, spec.shard_group)
    # ``"auto"`` is decided before a graph is traced for our passes; others gather once in forward.
    if spec.post_forward_group and spec.reshard_after_forward is True and is_traced_tensor(padded):
        sent = _from_parts(sent, spec)
    return off_the_wire(sent, dtype)


def _from_parts(sent: Tensor, spec: GatherSpec) -> Tensor:
    """``sent``, which all ranks have, gathered once more from the part that this rank keeps after
    forward. The compiler has backward do so, and forward read ``sent`` (``post_forward.py``)."""
    rows = sent.shape[0] // spec.post_forward_ranks
    with provenance.post_forward_part():
        # A copy, so that the whole can be freed: by a flip of no dimension, for Inductor takes
        # clones of views out of the joint graph.
        part = sent.narrow(0, spec.post_forward_rank * rows, rows).flip(())
    return _all_of(part, spec.post_forward_ranks, spec.post_forward_group)


def _all_of(part: Tensor, ranks: int, group: str) -> Tensor:
    return _collectives.wait_tensor(_collectives.all_gather_into_tensor(part, ranks, group))


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
        ctx.shard_rows = shard.shape[spec.dim] if shard.dim() else 0
        ctx.shard_dtype = shard.dtype
        return gather_shard(shard, spec) if kept is None else kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        with torch.no_grad(), provenance.reduce_of(ctx.spec.fqn):
            own = rows_first(grad, ctx.spec)
            reduced = reduce_grad(own, ctx.shard_rows, ctx.spec, ctx.deferral)
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
    spec = spec_from(fqn, fields)
    if not isinstance(param, DTensor):
        raise TypeError(
            f"{fqn or 'a parameter'}: expected the sharded DTensor, got {type(param).__name__}: it "
            "is read in a control-flow branch (torch.cond, say); read it before, and pass it in"
        )
    if param.is_meta:
        # Here, not where the parameter is read: Dynamo would take the code that it traces to be
        # uncompilable, for ever.
        raise ValueError(f"{fqn or 'a parameter'}: {ON_META}")
    if has_no_data(local_tensor(param)) and traces_for("inductor"):
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
