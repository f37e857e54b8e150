"""accelerate's ``Accelerator`` for wrapped models, which are neither put into DDP nor moved.

In a script only the import changes: ``from simplefsdp.integrations.accelerate import Accelerator``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.frontend.wrapped import layouts_of
from simplefsdp.integrations import checkpoint
from simplefsdp.integrations.registered import Loaded, Saved
from simplefsdp.pretrained.save import full_state_dict
from simplefsdp.rank_guard import ranks_of_params


class Accelerator(accelerate.Accelerator):
    """An ``Accelerator`` whose ``prepare`` takes models wrapped by simple_fsdp as they are.

    ``backward``, ``accumulate``, ``no_sync``, ``clip_grad_norm_``, ``save_state``, ``load_state``,
    ``get_state_dict`` and ``save_model`` do for a wrapped model what they do for a model in DDP.
    ``save_state`` and ``load_state`` also handle objects that are registered for checkpointing,
    such as an average of the model. Each rank saves its shards of models and optimizers, in the
    folder ``simplefsdp`` inside of the state's folder; shards in registered objects are saved as
    full tensors, from the main process's CPU. Other models are treated as by accelerate. Wrap and
    compile the model, and make its optimizer, before ``prepare``.
    """

    _optimizers: list[Any]
    _custom_objects: list[Any]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Like accelerate's, but a wrapped model stays on its device and is not put into DDP."""
        if not checkpoint.has_wrapped(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._check(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _check(self, model: nn.Module) -> None:
        self.check_processes(model)
        if self.num_processes > 1 and not self.even_batches:
            raise ValueError(
                "even_batches=False: ranks would run out of batches at different times, and those "
                "that go on would wait for the others' shards for ever; leave it True"
            )
        layouts = [v for m in model.modules() for v in layouts_of(m).values()]
        if any(layout.tensor_parallel is not None for layout in layouts):
            raise ValueError(
                "model: its tensor-parallel ranks need equal batches, but accelerate gives every "
                "rank batches of its own; wrap a model without tensor parallelism, or write the "
                "loop yourself"
            )

    def check_processes(self, model: nn.Module) -> None:
        """Raise a ValueError if accelerate counts fewer processes than ``model`` is sharded over:
        each rank would get all batches, and take itself for the main process."""
        ranks = len(ranks_of_params(model.parameters()))
        if self.num_processes < ranks:
            raise ValueError(
                f"accelerate knows of {self.num_processes} of the {ranks} ranks that the model is "
                "sharded over, so each rank would train on all batches; on a machine without GPUs "
                "pass Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
            )

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip by the norm over all ranks, and return it as a plain tensor."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(isinstance(param, DTensor) for param in params):
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(params, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on rank 0's CPU; an empty dict on other ranks. Every rank must call
        it."""
        if not unwrap or not checkpoint.has_wrapped(model):
            return super().get_state_dict(model, unwrap)
        model = self.unwrap_model(model, keep_torch_compile=False)
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Like accelerate's, but wrapped models and their optimizers as shards. Collective."""

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights[:] = [w for w in weights if not any(isinstance(v, DTensor) for v in w.values())]
            sharded = Path(folder, checkpoint.FOLDER)
            checkpoint.save(sharded, self._models_with_shards(optimizers), optimizers)

        registered = [Saved(one, keep=self.is_local_main_process) for one in self._custom_objects]
        with self._apart(registered) as optimizers, self.register_save_state_pre_hook(save):
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Like accelerate's, from what :meth:`save_state` wrote; the number of ranks may differ."""

        def load(models: list[nn.Module], folder: str) -> None:
            models[:] = [model for model in models if not checkpoint.has_wrapped(model)]
            sharded, ours = Path(folder, checkpoint.FOLDER), self._models_with_shards(optimizers)
            checkpoint.load(sharded, ours)
            checkpoint.load_optimizers(sharded, ours, optimizers)

        registered = [Loaded(one) for one in self._custom_objects]
        with self._apart(registered) as optimizers, self.register_load_state_pre_hook(load):
            super().load_state(input_dir, *args, **kwargs)

    def _models_with_shards(
        self, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> list[nn.Module]:
        """The wrapped models, and other models whose parameters are in ``optimizers``."""
        params = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        return [
            model
            for model in models
            if checkpoint.has_wrapped(model) or not params.isdisjoint(model.parameters())
        ]

    @contextmanager
    def _apart(self, registered: list[Any]) -> Iterator[list[torch.optim.Optimizer]]:
        """Inside, the optimizers of wrapped models are hidden from accelerate, and the stand-ins
        ``registered`` replace its registered objects. Gives these optimizers."""
        wrapped = {p for model in self._models_with_shards() for p in model.parameters()}
        every, objects = self._optimizers, self._custom_objects
        apart = [o for o in every if any(p in wrapped for g in o.param_groups for p in g["params"])]
        self._optimizers = [optimizer for optimizer in every if optimizer not in apart]
        self._custom_objects = registered
        try:
            yield [optimizer.optimizer for optimizer in apart]
        finally:
            self._optimizers, self._custom_objects = every, objects
