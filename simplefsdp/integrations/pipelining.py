"""Pipeline parallelism by ``torch.distributed.pipelining``, with wrapped modules as stages."""

from typing import Any

import torch
from torch.distributed import pipelining

from simplefsdp.frontend.accumulation import is_deferring, microbatch, reduce_now, syncing
from simplefsdp.frontend.waiting import waiting_sums


class PipelineStage(pipelining.PipelineStage):
    """A stage whose gradients are reduced once, in the backward of the last micro-batch.

    Wrap the stage's module over the ranks that hold the same stage, and compile it::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        simple_fsdp(module, mesh["dp"]).compile(backend="simplefsdp")
        group = mesh["pp"].get_group()
        stage = PipelineStage(module, mesh["pp"].get_local_rank(), 2, device, group=group)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    Args:
        args: of torch's stage.
        one_reduce: False to reduce in the backward of each micro-batch. This needs no memory for
            full gradients. It is required by schedules that split backwards into those of inputs
            and those of weights (zero bubble), and by schedules whose last backward is not that of
            the last micro-batch (``ScheduleLoopedBFS``). For zero-bubble schedules, compile stages
            with ``torch._functorch.config.donated_buffer = False``, as their graphs run backward
            twice.
        kwargs: of torch's stage.

    To add up gradients over several ``step`` calls, give the schedule ``scale_grads=False``, since
    torch divides the whole ``.grad`` at the end of each call. With
    ``simplefsdp.microbatch(module, is_last=...)`` around each call, only the last call reduces.

    Raises:
        ValueError: at the first backward, if the schedule requires ``one_reduce=False``; at the
            first forward, if the module is not wrapped.
    """

    def __init__(self, *args: Any, one_reduce: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.one_reduce = one_reduce

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Like torch's."""
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
        """Like torch's. After the last backward torch divides the gradients, so that no gradient
        may wait to be reduced by then."""
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
        # Gradients of parameters that the last micro-batch did not use are still waiting; or all
        # gradients, if the user's microbatch() around the step defers them.
        waits = is_last and any(map(waiting_sums, self.submod.parameters()))
        if waits and not is_deferring(self.submod):
            reduce_now(self.submod)
        return found

    def _is_last(self, chunk_id: int) -> bool:
        """Whether a micro-batch's backward reduces."""
        return not self.one_reduce or chunk_id == (self.chunks or 0) - 1

    # Since 2.13 torch runs a stage on uninitialised memory to learn shapes, and asks autograd for
    # the gradients of its inputs. A forward whose gradients are deferred would refuse that.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with syncing(self.submod, gradients=True):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        """Drop gradients of that uninitialised memory, which a loss with a backward of its own
        leaves. torch drops them only for FSDP2's modules."""
        super()._post_metadata_inference_cleanup()
        self.submod.zero_grad()
