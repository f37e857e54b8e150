"""Pipeline parallelism by ``torch.distributed.pipelining``, each stage's module wrapped."""

from typing import Any

import torch
from torch.distributed import pipelining

from simplefsdp.frontend.accumulation import microbatch


class PipelineStage(pipelining.PipelineStage):
    """A stage of which only the last micro-batch's backward communicates gradients.

    Wrap the stage's module over the ranks that hold the same stage, and compile it::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        simple_fsdp(module, mesh["dp"]).compile(backend="simplefsdp")
        group = mesh["pp"].get_group()
        stage = PipelineStage(module, mesh["pp"].get_local_rank(), 2, device, group=group)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    Torch's own ``PipelineStage`` takes a wrapped module, too: then every micro-batch's backward
    reduces its gradients, which takes no memory for full ones. Schedules that part backwards into
    those of inputs and of weights need that, and a module that is not compiled.

    Raises:
        ValueError: such a schedule, or one that does not end with the last micro-batch's backward.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        if not (self.has_backward and torch.is_grad_enabled()):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        with microbatch(self.submod, is_last=self._is_last(fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """As torch's."""
        is_last = self._is_last(bwd_chunk_id)
        if not full_backward or is_last != last_backward:
            raise ValueError(
                "schedule: expected whole backwards, the last micro-batch's at the end; take "
                "torch.distributed.pipelining.PipelineStage, by which each micro-batch's backward "
                "reduces gradients"
            )
        with microbatch(self.submod, is_last=is_last):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _is_last(self, chunk_id: int) -> bool:
        return chunk_id == (self.chunks or 0) - 1
