"""The modelled wire: a process group that stands for N virtual ranks in one process.

Buffers are real and so is the shard that rank 0 sends; every other rank is a copy of rank 0. A
collective that moves ``nbytes`` (gathered bytes: the full tensor) takes

    latency + nbytes / bandwidth        (an all-reduce twice that: reduce-scatter, then all-gather)

on its group's *lane*, one transfer after another in the order of issue. On CPU a lane is no more
than the time at which it is free: issuing a transfer moves it on, and waiting sleeps until that
transfer's own end. On CUDA the device keeps the time (``wire_lane.py``).

What a NIC does by DMA, a thread of its own does from when a transfer is issued: N copies of the
shard into a gathered tensor (left out, half the "parameters" would be stale memory), and one slot
out of a reduced one. Whoever waits, waits for that, too. Every variant has the same; on a machine
with a core to spare it takes no time of compute, as a NIC does not. `Transfer.copy_s` says how long
it was. Each group is a lane of its own with the whole bandwidth, which two groups over one NIC
would share.

The groups work under functional collectives (coalesced and not), Inductor's code, ``DTensor``,
``fully_shard`` and ``DistributedDataParallel``, on torch 2.11 to 2.13. Of what a real NCCL takes
from the compute they take the streaming multiprocessors, as many as ``link.blocks`` says, and the
memory traffic of the copies.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transfers import Transfer, Unsent, WireWork, link, told_to_profiler
from wire_copies import gather, reduce_scatter
from wire_lane import Lane

# "fake" tells simplefsdp's guard against ranks that differ that the other ranks are not processes.
BACKEND = "fake_wire"
# What copies in the place of a NIC; one after another, as transfers are.
_copier = ThreadPoolExecutor(1, "wire", initializer=torch.set_num_threads, initargs=(1,))
# C++ (DDP's reducer, say) calls the methods of a group as Python frames that Dynamo would compile.
_not_traced = torch.compiler.disable


class WireGroup(dist.ProcessGroup):
    """``size`` virtual ranks, of which this process is ``rank``; a lane of its own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name, self._desc = "", ""
        self._free_s = 0.0
        self._lane: Lane | None = None

    # What torch asks of a Python process group. ------------------------------------------------

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    @property
    def pg_name(self) -> str:
        return self.group_name

    @property
    def group_name(self) -> str:
        # init_process_group knows it before this object does.
        return dist.distributed_c10d._world.pg_names.get(self, self._name)

    def getGroupName(self) -> str:
        return self.group_name

    # Collectives. -------------------------------------------------------------------------------

    @_not_traced
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        return self._issue(
            "gather",
            outputs,
            lambda: gather(outputs, inputs, self._rank, self._size),
            inputs,
            outputs,
        )

    @_not_traced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input])

    @_not_traced
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        factor = self._factor(opts)
        return self._issue(
            "reduce",
            inputs,
            lambda: reduce_scatter(outputs, inputs, self._rank, self._size, factor),
            inputs,
            outputs,
        )

    @_not_traced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # The names of 2.11 and 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    @_not_traced
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        factor = self._factor(opts)

        def multiply() -> None:
            if factor != 1:
                torch._foreach_mul_(tensors, factor)

        return self._issue("all_reduce", tensors, multiply, tensors, tensors)

    allreduce_coalesced = allreduce

    @_not_traced
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        def copy() -> None:
            for slots, shard in zip(outputs, inputs, strict=True):
                for slot in slots:
                    slot.copy_(shard)

        full = [slot for slots in outputs for slot in slots]
        return self._issue("gather", full, copy, inputs, outputs)

    @_not_traced
    def broadcast(self, tensors: list[Tensor], opts: object = None) -> dist.Work:
        return self._issue("other", tensors, lambda: None, tensors, tensors)

    @_not_traced
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None
    ) -> dist.Work:
        def copy() -> None:
            for output, slots in zip(outputs, inputs, strict=False):
                output.copy_(slots[self._rank])

        return self._issue("other", outputs, copy, inputs, outputs)

    @_not_traced
    def barrier(self, opts: object = None) -> dist.Work:
        return self._issue("other", [], lambda: None, [], [])

    # The model. ---------------------------------------------------------------------------------

    def _factor(self, opts: Any) -> float:
        """What a reduction of equal contributions multiplies them by."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return float(self._size) if op == dist.ReduceOp.SUM else 1.0

    def _issue(
        self,
        kind: str,
        full: list[Tensor],
        copy: Callable[[], None],
        inputs: object,
        outputs: object,
    ) -> dist.Work:
        """Put a transfer of the tensors ``full`` on the lane; ``copy`` makes its outputs."""
        if not link.sends:
            return Unsent()
        nbytes = sum(t.numel() * t.element_size() for t in full)
        now = time.perf_counter()
        free = max(now, self._free_s)
        modelled = link.seconds(kind, nbytes) if kind != "other" else 0.0
        self._free_s = free + modelled
        transfer = Transfer(kind, nbytes, self.group_name, now, modelled, self._free_s)
        link.transfers.append(transfer)
        timed = functools.partial(_copy, copy, transfer)
        done: torch.cuda.Event | Future[None]
        with told_to_profiler(transfer, free - now):
            if full and full[0].is_cuda:
                done = self._on_lane(timed, modelled, full[0].device)
            else:
                done = _copier.submit(timed)
        return WireWork(transfer, inputs, outputs, done)

    def _on_lane(
        self, copy: Callable[[], None], seconds: float, device: torch.device
    ) -> torch.cuda.Event:
        if self._lane is None:
            self._lane = Lane(device)
        return self._lane.transfer(copy, seconds, link.blocks)


def _copy(copy: Callable[[], None], transfer: Transfer) -> None:
    begin = time.perf_counter()
    with torch.no_grad():
        copy()
    transfer.copy_s = time.perf_counter() - begin


def _all_gather_out(shard: Tensor, size: int, group_name: Any, *, out: Tensor) -> Tensor:
    """The one functional collective whose C++ looks for a C++ backend, not for our method."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    work = group.all_gather_single(out, shard)
    torch._C._distributed_c10d._register_work(out, work)
    return out


_library: list[torch.library.Library] = []  # its kernels live as long as it does


def connect(world_size: int) -> None:
    """Make the modelled wire the default process group: rank 0 of ``world_size`` virtual ranks."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND,
            lambda store, rank, size, timeout: WireGroup(rank, size),
            devices=["cpu", "cuda"],
        )
        _library.append(torch.library.Library("_c10d_functional", "IMPL"))
        for key in ("CPU", "CUDA"):
            _library[0].impl("all_gather_into_tensor_out", _all_gather_out, key)
    dist.init_process_group(backend=BACKEND, store=dist.HashStore(), rank=0, world_size=world_size)


def set_link(latency_s: float, bandwidth: float, blocks: int | None = None) -> None:
    """Give the wire its latency (seconds) and bandwidth (bytes per second).

    ``blocks`` of a GPU are held by a transfer, if it is given; NCCL takes 16 to 24 on an H100.
    """
    link.latency_s, link.bandwidth = latency_s, bandwidth
    link.blocks = link.blocks if blocks is None else blocks
