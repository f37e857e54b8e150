"""accelerate's ``Accelerator`` for wrapped models: it neither puts them into DDP nor moves them.

``from simplefsdp.integrations.accelerate import Accelerator`` is all that changes in a script.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.frontend.wrapped import LAYOUTS
from simplefsdp.integrations import checkpoint
from simplefsdp.pretrained.save import full_state_dict

REGISTERED = "simplefsdp_registered"  # in accelerate's own checkpoint folder


class Accelerator(accelerate.Accelerator):
    """An ``Accelerator`` whose ``prepare`` takes models wrapped by simple_fsdp as they are.

    ``backward``, ``accumulate``, ``no_sync``, ``clip_grad_norm_``, ``save_state``, ``load_state``,
    ``get_state_dict`` and ``save_model`` do to a wrapped model what they do to one in DDP, and so
    do ``save_state`` and ``load_state`` to what is registered for checkpointing, as an average of
    it. Shards are saved by each rank, in folders of the state's whose names begin with
    ``simplefsdp``. Other models are treated as ever. Wrap and compile the model, and make its
    optimizer, before ``prepare``.
    """

    _optimizers: list[Any]
    _custom_objects: list[Any]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """As accelerate's, but a wrapped model stays where it is and is not put into DDP."""
        if not checkpoint.has_wrapped(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._check(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _check(self, model: nn.Module) -> None:
        if self.num_processes > 1 and not self.even_batches:
            raise ValueError(
                "even_batches=False: ranks would run out of batches at different times, and those "
                "that go on would wait for the others' shards for ever; leave it True"
            )
        layouts = [v for m in model.modules() for v in m.__dict__.get(LAYOUTS, {}).values()]
        if any(layout.tensor_parallel is not None for layout in layouts):
            raise ValueError(
                "model: its tensor-parallel ranks need equal batches, but accelerate gives every "
                "rank batches of its own; wrap a model without tensor parallelism, or write the "
                "loop yourself"
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
        """The full values, on rank 0's CPU; an empty dict elsewhere. Every rank must call it."""
        if not unwrap or not checkpoint.has_wrapped(model):
            return super().get_state_dict(model, unwrap)
        model = self.unwrap_model(model, keep_torch_compile=False)
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; wrapped models and their optimizers as shards. Collective."""

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights[:] = [w for w in weights if not any(isinstance(v, DTensor) for v in w.values())]
            shards, its_models = Path(folder, checkpoint.FOLDER), self._models_of(optimizers)
            checkpoint.save(shards, its_models, optimizers)
            if registered:
                checkpoint.save_states(Path(folder, REGISTERED), _states_of(registered))

        with self._apart() as (optimizers, registered), self.register_save_state_pre_hook(save):
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's, from what :meth:`save_state` wrote, on any number of ranks."""

        def load(models: list[nn.Module], folder: str) -> None:
            models[:] = [model for model in models if not checkpoint.has_wrapped(model)]
            shards, its_models = Path(folder, checkpoint.FOLDER), self._models_of(optimizers)
            checkpoint.load(shards, its_models)
            checkpoint.load_optimizers(shards, its_models, optimizers)
            if registered:
                states = checkpoint.load_states(Path(folder, REGISTERED), _states_of(registered))
                for name, state in states.items():
                    registered[name].load_state_dict(state)

        with self._apart() as (optimizers, registered), self.register_load_state_pre_hook(load):
            super().load_state(input_dir, *args, **kwargs)

    def _models_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Module]:
        """The wrapped models, and others of which ``optimizers`` have parameters."""
        theirs = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        return [
            model
            for model in models
            if checkpoint.has_wrapped(model) or not theirs.isdisjoint(model.parameters())
        ]

    @contextmanager
    def _apart(self) -> Iterator[tuple[list[torch.optim.Optimizer], dict[str, Any]]]:
        """Inside, accelerate does not see the optimizers of wrapped models, and what is registered
        that holds shards, of which it would save rank 0's; gives these, the latter by name."""
        mine = {p for model in self._models_of(()) for p in model.parameters()}
        every, all_registered = self._optimizers, self._custom_objects
        apart = [o for o in every if any(p in mine for g in o.param_groups for p in g["params"])]
        registered = {
            f"registered_{i}": of
            for i, of in enumerate(all_registered)
            if checkpoint.is_sharded(of.state_dict())
        }
        hidden = {id(of) for of in registered.values()}
        self._optimizers = [optimizer for optimizer in every if optimizer not in apart]
        self._custom_objects = [of for of in all_registered if id(of) not in hidden]
        try:
            yield [optimizer.optimizer for optimizer in apart], registered
        finally:
            self._optimizers, self._custom_objects = every, all_registered


def _states_of(registered: Mapping[str, Any]) -> dict[str, Any]:
    return {name: of.state_dict() for name, of in registered.items()}
