"""A model of FSDP2 eager: what it would launch, in which order, and when it would wait.

FSDP2's own code runs a step, on fake tensors in a fake process group, and every op is noted as one
op of a :class:`~inductor_passes.ir.program.Program` (``fsdp2_recorder.py``): a kernel of its own
that reads and writes its own buffers, casts and the copies into and out of the buffers of
collectives (``all_gather_copy_in``, ``split_with_sizes_copy``, ``chunk_cat``) included. The units
are torchtitan's: the embedding, each layer, final norm and output matrix together (which stay
gathered from forward to backward), the root.

What no op tells is when streams wait for each other; that follows FSDP2's source:

- A gather is waited for by its copy-out.
- In forward the CPU is ahead: the next unit's gather, and its copy-in, start when the copy-out of
  the one before is done, as FSDP2's event makes it. In backward FSDP2 prefetches itself.
- A reduce is waited for when the next unit has its gradients, and the last at the end. With copies
  across nodes (hybrid), its all-reduce starts then, and is waited for at the end.
- Gathers and reduces, on streams of their own, share one communicator, so they serialise.
- Kernels of all streams share the device: copies on side streams take time on the compute lane.
- The CPU is never late: no time is counted for eager dispatch beyond the launch of a kernel.

The model is ours, run op by op: its RMSNorm and rotary turn are eight and nine kernels. torch's
``nn.RMSNorm``, which torchtitan uses, is one where torch is recent, so FSDP2 is a little slower
here than there.

For memory the order is the one in which the CPU launches (that is when the allocator gives a
block), and a block is free when Python has let it go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp2_recorder import Recorder
from scale_cells import POLICY, Cell, data_parallel_mesh, in_fake_model, tokens_and_targets
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from variants import LlamaLoss, cast_recomputed_inputs

from inductor_passes.ir.program import Op, Program
from inductor_passes.machine.cluster import Work
from inductor_passes.machine.simulate import live_at_peak, sum_by_use


@dataclass(frozen=True)
class Recording:
    """A step of FSDP2 eager, forward and backward.

    Attributes:
        issued: the program in the order in which the CPU launches; for memory.
        executed: the same with the gathers of forward where the device starts them; for time.
        work: of each op.
        use: what a storage is for, if it is FSDP2's.
    """

    issued: Program
    executed: Program
    work: dict[str, Work]
    use: dict[str, str]

    def live_by_use(self) -> dict[str, int]:
        """Bytes at the peak, without parameter shards, by what they are for."""
        return sum_by_use(live_at_peak(self.issued), self.use)


def wrap(cell: Cell, mesh: DeviceMesh, model: LlamaLoss) -> LlamaLoss:
    """Apply FSDP2 as torchtitan does."""
    options: dict[str, Any] = {"mesh": data_parallel_mesh(cell, mesh), "mp_policy": POLICY}
    for layer in model.layers:
        fully_shard(layer, **options)
    if model.lm_head is not None:  # else the one matrix is the root's, and stays gathered
        fully_shard(model.embed_tokens, **options)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    cast_recomputed_inputs(model.layers, POLICY)
    return model


def record_step(cell: Cell, mesh: DeviceMesh) -> Recording:
    """Run a step of the cell's model under FSDP2, on fake tensors, and note it."""

    def run(model: nn.Module) -> Recording:
        inputs = tokens_and_targets(cell)
        parameters = list(model.parameters())
        with Recorder() as recorder:
            loss = model(*inputs)
            forward_ops = len(recorder.ops)
            loss.backward()
        issued = recorder.program(parameters, [p.grad for p in parameters if p.grad is not None])
        executed = replace(issued, ops=tuple(_ahead(issued, forward_ops)))
        return Recording(issued, executed.verify(), recorder.work, recorder.use)

    return in_fake_model(cell, mesh, partial(wrap, cell, mesh), run)


def _ahead(program: Program, forward_ops: int) -> Iterator[Op]:
    """The ops with each gather of forward, and what it needs, directly behind the copy-out before
    it."""
    moved: set[int] = set()
    slots: dict[int, list[int]] = {}
    out = -1
    for i, op in enumerate(program.ops[:forward_ops]):
        if op.name.startswith("split_with_sizes_copy"):
            out = i
        elif op.sends == "gather" and out >= 0:
            chain = [j for j in sorted(_needed(program, i, out)) if j not in moved]
            slots.setdefault(out, []).extend(chain)
            moved.update(chain)
    for i, op in enumerate(program.ops):
        if i not in moved:
            yield op
        yield from (program.ops[j] for j in slots.get(i, ()))


def _needed(program: Program, i: int, after: int) -> set[int]:
    """Positions of op ``i`` and of all behind ``after`` that it depends on."""
    found, stack = {i}, [i]
    while stack:
        for j in program.predecessors[stack.pop()]:
            if j > after and j not in found:
                found.add(j)
                stack.append(j)
    return found
