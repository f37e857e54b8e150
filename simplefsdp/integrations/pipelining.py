"""Pipeline parallelism by ``torch.distributed.pipelining``, each stage's module wrapped."""

from typing import Any

import torch
from torch.distributed import pipelining

from simplefsdp.frontend.accumulation import is_deferring, microbatch, reduce_now, syncing
from simplefsdp.frontend.waiting import waiting_sums


class PipelineStage(pipelining.PipelineStage):
    """A stage whose micro-batches share one reduce of the gradients, in the last one's backward.

    Wrap the stage's module over the ranks that hold the same stage, and compile it::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        simple_fsdp(module, mesh["dp"]).compile(backend="simplefsdp")
        group = mesh["pp"].get_group()
        stage = PipelineStage(module, mesh["pp"].get_local_rank(), 2, device, group=group)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    Args:
        args: torch's.
        one_reduce: False: each micro-batch's backward reduces. It takes no memory for full
            gradients, and schedules need it that part backwards into those of inputs and of
            weights (zero bubbles), or whose last backward is not the last micro-batch's
            (``ScheduleLoopedBFS``). Where zero bubbles are, compile the stages with
            ``torch._functorch.config.donated_buffer = False``: their graphs run backward twice.
        kwargs: torch's.

    To add up gradients over several ``step`` calls, give the schedule ``scale_grads=False``: torch
    divides all that is in ``.grad`` at the end of each. With
    ``simplefsdp.microbatch(module, is_last=...)`` around each of them only the last one sends.

    Raises:
        ValueError: such a schedule with one reduce, at its first backward; or the module is not
            wrapped, at its first forward.
    """

    def __init__(self, *args: Any, one_reduce: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.one_reduce = one_reduce

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        trains = self.has_backward and torch.is_grad_enabled()
        with microbatch(self.submod, is_last=not trains or self._is_last(fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """As torch's; it divides gradients after the last one, so nothing may wait then."""
        if not self.has_backward:
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        is_last = self._is_last(bwd_chunk_id)
        if self.one_reduce and not (full_backward and is_last == last_backward):
            raise ValueError(
                "schedule: expected whole backwards, that of the last micro-batch at the end, for "
                "one reduce of all; pass PipelineStage(..., one_reduce=False)"
            )
        with microbatch(self.submod, is_last=is_last):
            found = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # What the last micro-batch has not used waits; or all, if the user says so around the step.
        waits = is_last and any(map(waiting_sums, self.submod.parameters()))
        if waits and not is_deferring(self.submod):
            reduce_now(self.submod)
        return found

    def _is_last(self, chunk_id: int) -> bool:
        """Whether a micro-batch's backward reduces."""
        return not self.one_reduce or chunk_id == (self.chunks or 0) - 1

    # Since 2.13 torch runs a stage on uninitialised memory to learn shapes, and asks autograd for
    # gradients of its inputs, which a forward whose gradients are not sent refuses.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with syncing(self.submod, gradients=True):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        """A loss that has a backward of its own has left gradients of that memory, which torch
        drops of FSDP2's modules only."""
        super()._post_metadata_inference_cleanup()
        self.submod.zero_grad()
