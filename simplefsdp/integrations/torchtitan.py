"""torchtitan 0.3: its trainer, its models and its command line, sharded by ``simple_fsdp``.

``python -m torchtitan.train --module simplefsdp.integrations.torchtitan --config llama3_8b``
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.trainer import Trainer

from simplefsdp.frontend.accumulation import microbatch
from simplefsdp.frontend.control import set_gradient_divide_factor
from simplefsdp.frontend.wrap import simple_fsdp
from simplefsdp.frontend.wrapped import is_wrapped
from simplefsdp.integrations.pipelining import PipelineStage

# Schedules that split backwards into those of inputs and those of weights.
_IN_PARTS = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)
_FAMILIES = ("llama3", "qwen3")  # in torchtitan.models


def use_simple_fsdp(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """A configuration like ``config`` whose model is sharded by ``simple_fsdp``, and compiled with
    ``options``. ``--compile.no-enable`` trains it without compiling.
    """
    assert config.model_spec is not None  # every config function of torchtitan sets it
    pipelining_fn = config.model_spec.pipelining_fn  # None if torchtitan has none for the model
    return replace(
        config,
        model_spec=replace(
            config.model_spec,
            parallelize_fn=partial(parallelize, compile_options=options),
            pipelining_fn=pipelining_fn and partial(_pipelined, pipelining_fn),
        ),
        # torchtitan's other SPMD backends annotate parameters, which would not be sharded then.
        parallelism=replace(config.parallelism, spmd_backend="partial_dtensor"),
        compile=replace(config.compile, enable=True),
        training=replace(config.training, disable_cuda_graphs=True),
        loss=_with_one_reduce(config.loss),
    )


class OneReduceChunkedLoss(ChunkedLossWrapper):
    """torchtitan's loss in chunks, with one gather and one reduce of ``lm_head`` for all chunks.

    torchtitan itself does so only if ``lm_head`` is an ``FSDPModule`` of FSDP2.
    """

    lm_head: Any

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """torchtitan's configuration of this loss."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        head = self.lm_head
        if not is_wrapped(head):
            return super().__call__(*args, **kwargs)
        chunk = count(1)

        def of_chunk(hidden: Tensor) -> Tensor:
            with microbatch(head, is_last=next(chunk) == self.num_chunks):
                return head(hidden)

        self.lm_head = of_chunk  # torchtitan only calls it
        head.unshard()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            head.reshard()
            self.lm_head = head


def _with_one_reduce(loss: BaseLoss.Config) -> BaseLoss.Config:
    if type(loss) is not ChunkedLossWrapper.Config:
        return loss
    return OneReduceChunkedLoss.Config(num_chunks=loss.num_chunks, loss_fn=loss.loss_fn)


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """The config function ``name`` of torchtitan, with ``use_simple_fsdp`` around it."""
    family = name.split("_", maxsplit=1)[0]
    if family in _FAMILIES:
        registry = import_module(f"torchtitan.models.{family}.config_registry")
        if hasattr(registry, name):
            return lambda: use_simple_fsdp(getattr(registry, name)())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parallelize(
    model: Any,
    *,
    parallel_dims: ParallelDims,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    compile_options: dict[str, Any] | None = None,
) -> nn.Module:
    """torchtitan's ``parallelize_fn``: applies tensor parallelism and activation checkpointing,
    then wraps and compiles the model.

    Raises:
        ValueError: the configuration asks for something else, such as context parallelism.
    """
    _refuse(parallel_dims, training, parallelism, compile_config)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    hybrid = parallel_dims.dp_replicate_enabled
    simple_fsdp(
        model,
        parallel_dims.get_mesh(["dp_replicate", "fsdp"] if hybrid else ["fsdp"]),
        mode="hybrid_shard" if hybrid else "fully_shard",
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        reshard_after_forward=get_fsdp_reshard_after_forward_policy(
            # Reshard in pipelines, too: else each micro-batch in flight would keep its own copy.
            parallelism.fsdp_reshard_after_forward,
            pp_enabled=False,
        ),
    )
    set_gradient_divide_factor(model, 1.0)  # the loss is divided by all ranks' tokens
    if compile_config.enable and "model" in compile_config.components:
        model.compile(backend="simplefsdp", options=compile_options)
    return model


def _pipelined(pipelining_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torchtitan's ``pipelining_fn`` with our stages. Micro-batches share one reduce if the
    schedule is known not to split backwards."""
    parallelism = kwargs["parallelism"]
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    in_parts = parallelism.pipeline_parallel_schedule_csv or issubclass(schedule, _IN_PARTS)
    theirs = pipeline_parallel.PipelineStage  # the name by which that module makes stages
    pipeline_parallel.PipelineStage = partial(PipelineStage, one_reduce=not in_parts)
    try:
        return pipelining_fn(*args, **kwargs)
    finally:
        pipeline_parallel.PipelineStage = theirs


def _refuse(
    parallel_dims: ParallelDims, training: Any, parallelism: Any, compile_config: Any
) -> None:
    asked_for = {
        "parallelism.context_parallel_degree": parallel_dims.cp > 1,
        "parallelism.expert_parallel_degree": parallel_dims.ep > 1,
        "parallelism.enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        "compile.enable_async_tensor_parallel": compile_config.enable_async_tensor_parallel,
        "training.enable_cpu_offload": training.enable_cpu_offload,
    }
    for name, is_asked_for in asked_for.items():
        if is_asked_for:
            raise ValueError(
                f"{name}: expected torchtitan's default with simple_fsdp, which cannot do that "
                "here; leave it out, or use torchtitan's own --module"
            )
