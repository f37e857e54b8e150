"""transformers' ``Trainer`` for wrapped models.

Beside wrapping the model, only the import changes in a script: ``from
simplefsdp.integrations.transformers import Trainer``. To use a trainer of another library, make a
subclass of this class and that one, in this order. If that trainer changes the model itself, as
TRL's do (adapters by ``peft_config``, a reference model), give it the plain model and ``wrap``::

    class SFT(Trainer, trl.SFTTrainer): ...

    def wrap(model):
        simple_fsdp(model).compile(backend="simplefsdp")

    SFT(model, args=args, train_dataset=data, peft_config=config, wrap=wrap).train()
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME
from transformers.utils.import_utils import is_peft_available

from simplefsdp.frontend.after_wrap import refuse_unsharded
from simplefsdp.frontend.full_parameters import unsharded
from simplefsdp.integrations import checkpoint
from simplefsdp.integrations.accelerate import Accelerator
from simplefsdp.pretrained.together import together
from simplefsdp.rank_guard import ranks_of_params

# Arguments that would do harm or have no effect, with what to do instead.
_POLICY = "pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) to simple_fsdp"
_SHARDED = "simple_fsdp has sharded it; leave that out"
_REFUSED = {
    "torch_compile": "accelerate does not know our backend; call model.compile() yourself",
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "fp16_full_eval": _POLICY,
    "bf16_full_eval": _POLICY,
    "precompute_ref_log_probs": "TRL takes the model for a plain one then; leave it out",
    "auto_find_batch_size": "where one rank runs out of memory and others do not, these would wait "
    "for it for ever; set per_device_train_batch_size",
}


class Trainer(transformers.Trainer):
    """A ``Trainer`` of a model wrapped by simple_fsdp.

    Wrap and compile the model first, or let ``wrap`` do so. Losses, accumulation, clipping and
    evaluation mean what they mean with DDP. ``save_model`` writes a folder for ``from_pretrained``.
    A checkpoint holds shards instead, in its folder ``simplefsdp``, unless ``save_only_model``.
    ``resume_from_checkpoint`` continues from the shards: on CPU bit for bit; CUDA kernels, and code
    that is compiled for other sizes, may round differently. ``load_best_model_at_end`` works. For a
    PEFT model, ``save_model`` and checkpoints write the adapters only. Every rank must call
    ``train``, ``evaluate``, ``save_model`` and so on.

    Args:
        wrap: called with the model, and with the reference model of TRL's trainers, after all else
            has been made; also with each model that ``model_init`` gives. It must call simple_fsdp.
            All other arguments go to the trainer.

    Raises:
        ValueError: the model is not wrapped, or an argument does not work with a wrapped model.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, wrap: Callable[[nn.Module], object] | None = None, **kwargs: Any
    ) -> None:
        self._wrap, self._waits_for_wrap = wrap, wrap is not None
        with _explained():
            super().__init__(*args, **kwargs)
            if wrap is not None:
                _wrap_each(wrap, self.model, getattr(self, "ref_model", None))
                self._waits_for_wrap = False
            _check_model(self.model)
            self.accelerator.check_processes(self.model)
            _check_optimizer(self.optimizer, self.args)
            refuse_unsharded(self.model)
        if wrap is not None and self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)  # tensors that are no shards

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse models and arguments that would not work, before anything else is made; then use
        our accelerator."""
        if not self._waits_for_wrap and self.model is not None:  # model_init gives it later
            _check_model(self.model)
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        # transformers has made its accelerator with all arguments; our class only adds methods.
        self.accelerator.__class__ = Accelerator

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Like the trainer's, but the model of ``model_init`` is wrapped by ``wrap`` if it is not
        wrapped yet."""
        model = super().call_model_init(trial)
        if self._wrap is not None:
            _wrap_each(self._wrap, model)
        _check_model(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self._waits_for_wrap:  # else it is moved after the wrap, as shards
            super()._move_model_to_device(model, device)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Like the trainer's, but makes sure that all ranks have equally many batches."""
        loader = super().get_train_dataloader()
        if not self.accelerator.even_batches and self.args.dataloader_drop_last:
            # With drop_last they are even, as sentence-transformers makes its batches.
            self.accelerator.even_batches = True
        return loader

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator's clip_grad_norm_ takes any parameters

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for ``from_pretrained``. Every rank must call it."""
        if _internal_call and not self.args.save_only_model:
            shards = _shards(str(output_dir))
            shards.mkdir(parents=True, exist_ok=True)
            checkpoint.save(shards, [self.model], [self._optimizer], frozen=not self._peft)
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        keep = self.args.should_save
        if getattr(super()._save, "__func__", None) is not transformers.Trainer._save:
            # The trainer of another library, as sentence-transformers, reads the model itself.
            ranks = ranks_of_params(self.model.parameters())
            with unsharded(self.model, writeback=False), together("what save_model does", ranks):
                if keep:
                    super()._save(output_dir)
            return
        if self._peft:
            from simplefsdp.integrations.peft import adapter_state_dict

            state_dict = adapter_state_dict(self.model, keep=keep)
        else:
            state = self.model.state_dict(keep_vars=True)
            state_dict = checkpoint.gathered(self.model, state, keep=keep)
        super()._save(output_dir, state_dict)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the scheduler only, as the optimizer was saved with the model."""
        if self.args.should_save:
            with warnings.catch_warnings(action="ignore"):  # a warning to save the optimizer, too
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if _shards(resume_from_checkpoint).is_dir():
            checkpoint.load(_shards(resume_from_checkpoint), [self.model], frozen=not self._peft)
        else:  # a checkpoint of another Trainer: full values, of which each rank keeps its shard
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if _shards(best).is_dir():
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        shards = _shards(checkpoint_folder)
        if not shards.is_dir():
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint_folder} has no folder {shards.name!r} with "
                "the optimizer's shards, so that training cannot go on from there; to start from "
                "its weights, load them into the model"
            )
        checkpoint.load_optimizers(shards, [self.model], [self._optimizer])
        saved = torch.load(Path(checkpoint_folder, SCHEDULER_NAME), weights_only=True)
        with warnings.catch_warnings(action="ignore"):
            self.lr_scheduler.load_state_dict(saved)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def _peft(self) -> bool:
        if not is_peft_available():
            return False
        from peft import PeftModel

        return isinstance(self.model, PeftModel)


def _wrap_each(wrap: Callable[[nn.Module], object], *models: object) -> None:
    for model in models:
        if isinstance(model, nn.Module) and not checkpoint.has_wrapped(model):
            wrap(model)


@contextmanager
def _explained() -> Iterator[None]:
    """Inside, errors caused by a trainer that adds parameters to a wrapped model get a note."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if any(words in str(error) for words in ("mixed torch.Tensor and DTensor", "not sharded")):
            error.add_note(
                "if the trainer adds to the model itself, as by peft_config, give it the plain "
                "one, and Trainer(..., wrap=function) the function that calls simple_fsdp"
            )
        raise


def _shards(folder: str) -> Path:
    return Path(folder, checkpoint.FOLDER)


def _check_model(model: nn.Module | None) -> None:
    if model is None or not checkpoint.has_wrapped(model):
        raise ValueError(
            f"model: expected one that simple_fsdp wrapped, got {type(model).__name__}; wrap it "
            "before the Trainer is made, give it wrap=, or use transformers.Trainer"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model: torch.compile() put it into another module, of which the Trainer cannot tell "
            'what its forward takes; call model.compile(backend="simplefsdp")'
        )


def _check_arguments(args: transformers.TrainingArguments) -> None:
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments.{name}: not for a wrapped model; {instead}")


def _check_optimizer(given: object, args: transformers.TrainingArguments) -> None:
    optim = str(getattr(args.optim, "value", args.optim))
    if given is None and "adafactor" in optim:
        raise ValueError(
            f"TrainingArguments.optim: {optim} mixes plain tensors with shards, and would fail at "
            "its first step, as under FSDP2; set optim='adamw_torch', or pass optimizers="
        )
