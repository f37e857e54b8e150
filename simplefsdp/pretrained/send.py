"""Sends a sharded tensor to one rank, piece by piece, so that no rank has to hold all of it.

Along each mesh dimension, ranks send their rows to the rank with the receiver's coordinate there::

    mesh (tp 2, dp 2), Shard(0) and Shard(0); rank 0 receives

    dp   rank 1 ──▶ rank 0      rank 3 ──▶ rank 2      each has one half then
    tp   rank 2 ──▶ rank 0                             rank 0 gets the whole, in pieces
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from simplefsdp.frontend.full_parameters import full_of
from simplefsdp.frontend.placement import part_of

# Bytes of all ranks' pieces together, on the receiver.
_PIECE_NBYTES = 1 << 24

Sink = Callable[[int, Tensor], object]
"""Takes rows of the whole tensor, and the index of the first of them; a scalar is a row."""


class _Step(NamedTuple):
    """One gather, along a dimension of the mesh and a dimension of the tensor."""

    mesh_dim: int
    tensor_dim: int
    shape: tuple[int, ...]  # of the result


@torch.no_grad()
def send(tensor: Tensor, receiver: int, sink: Sink) -> None:
    """Call ``sink`` on the global rank ``receiver`` with all rows of ``tensor``.

    Collective over the mesh of a DTensor. The other ranks keep nothing; if the tensor is split over
    several mesh dimensions, some of them hold a part of the whole meanwhile, in host memory.
    """
    if not isinstance(tensor, DTensor):
        _give(tensor.detach(), receiver, sink)
    elif all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        _send_shards(tensor, receiver, sink)
    else:
        _give(full_of(tensor), receiver, sink)


def _send_shards(param: DTensor, receiver: int, sink: Sink) -> None:
    mesh = param.device_mesh
    here, homes = mesh.get_coordinate(), (mesh.mesh == receiver).nonzero().tolist()
    if here is None or not homes or not param.numel():
        return
    (home,) = homes
    copies = [d for d, p in enumerate(param.placements) if isinstance(p, Replicate)]
    if any(here[dim] != home[dim] for dim in copies):
        return
    part = param.to_local().detach()
    steps = _steps(param, here)
    for i, step in enumerate(steps):
        stands_there = here[step.mesh_dim] == home[step.mesh_dim]
        last = i == len(steps) - 1
        if last and step.tensor_dim:
            _gather_across(part, step, mesh, home[step.mesh_dim], sink)
            return
        whole = torch.empty(step.shape if stands_there and not last else 0, dtype=part.dtype)
        take = sink if last else into(whole, step.tensor_dim)
        _gather(part, step, mesh, home[step.mesh_dim], take)
        if not stands_there or last:
            return
        part = whole
    _give(part, receiver, sink)


def _give(full: Tensor, receiver: int, sink: Sink) -> None:
    if not dist.is_initialized() or dist.get_rank() == receiver:
        sink(0, full)


def into(full: Tensor, dim: int = 0) -> Sink:
    """A sink that writes the rows along dimension ``dim`` into ``full``."""

    def write(begin: int, rows: Tensor) -> None:
        if not full.dim():
            full.copy_(rows)
            return
        full.movedim(dim, 0)[begin : begin + rows.shape[0]] = rows

    return write


def _steps(param: DTensor, here: Sequence[int]) -> list[_Step]:
    """The gathers, in order. They go through mesh dimensions from right to left, because the tensor
    was split along them from left to right."""
    mesh, shape = param.device_mesh, list(param.shape)
    steps: list[_Step] = []
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and mesh.size(dim) > 1:
            steps.insert(0, _Step(dim, placement.dim, tuple(shape)))
            _, shape[placement.dim] = part_of(shape[placement.dim], mesh.size(dim), here[dim])
    return steps


def _gather(part: Tensor, step: _Step, mesh: DeviceMesh, home: int, sink: Sink) -> None:
    """Give the rows of all parts to ``sink``, on the rank whose coordinate along the mesh dimension
    is ``home``; a few rows of each part at a time."""
    ranks = mesh.size(step.mesh_dim)
    rows = part.movedim(step.tensor_dim, 0)
    total = step.shape[step.tensor_dim]
    chunk = -(-total // ranks)
    row_nbytes = rows.shape[1:].numel() * part.element_size()
    at_once = max(1, min(chunk, _PIECE_NBYTES // max(1, row_nbytes * ranks)))
    gathered = _Pieces((at_once, *rows.shape[1:]), part.dtype, step, mesh, home)
    for begin in range(0, chunk, at_once):
        for rank, got in enumerate(gathered.of(rows[begin : begin + at_once])):
            first = rank * chunk + begin
            there = min(at_once, chunk - begin, total - first)
            if there > 0:
                sink(first, got[:there])


def _gather_across(part: Tensor, step: _Step, mesh: DeviceMesh, home: int, sink: Sink) -> None:
    """As :func:`_gather`, for parts that have some columns of all rows; ``sink`` gets rows."""
    ranks, dim = mesh.size(step.mesh_dim), step.tensor_dim
    chunk = -(-step.shape[dim] // ranks)
    widths = [part_of(step.shape[dim], ranks, rank)[1] for rank in range(ranks)]
    row = (*step.shape[1:dim], chunk, *step.shape[dim + 1 :])
    row_nbytes = torch.Size(row).numel() * part.element_size()
    at_once = max(1, min(step.shape[0], _PIECE_NBYTES // max(1, row_nbytes * ranks)))
    gathered = _Pieces((at_once, *row), part.dtype, step, mesh, home)
    for begin in range(0, step.shape[0], at_once):
        got = gathered.of(part[begin : begin + at_once])
        if got:
            columns = [one.narrow(dim, 0, n) for one, n in zip(got, widths, strict=True)]
            sink(begin, torch.cat(columns, dim)[: step.shape[0] - begin])


class _Pieces:
    """Sends pieces of one shape to one rank. Their memory is allocated once: many large buffers
    that come and go would add up in the allocator."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, step: _Step, mesh: DeviceMesh, home: int
    ) -> None:
        self.piece = torch.zeros(*shape, dtype=dtype, device=mesh.device_type)
        self.sent = self.piece.view(-1).view(torch.uint8)  # bytes, which every backend can send
        self.group, self.home = mesh.get_group(step.mesh_dim), home
        receives = mesh.get_local_rank(step.mesh_dim) == home
        ranks = mesh.size(step.mesh_dim)
        self.got = [torch.empty_like(self.sent) for _ in range(ranks)] if receives else None

    def of(self, own: Tensor) -> list[Tensor]:
        """The pieces of all ranks, on the one that receives; ``own`` is this rank's."""
        self.piece[tuple(slice(0, n) for n in own.shape)] = own
        dist.gather(self.sent, self.got, group=self.group, group_dst=self.home)
        return [got.view(self.piece.dtype).view(self.piece.shape) for got in self.got or ()]
