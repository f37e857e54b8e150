"""``compile_step``: forward, loss, backward, clipping and update as one compiled program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim.optimizer import Optimizer

from simplefsdp import _torch
from simplefsdp._torch import updates
from simplefsdp.compiler.backend import simplefsdp
from simplefsdp.frontend.accumulation import note_reduced
from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.frontend.kept import expect_writes
from simplefsdp.frontend.living import living_shards
from simplefsdp.step.scalars import CountsDiffer, Numbers, Scalars, scalars_of
from simplefsdp.step.update import Update, capture, hyperparameters, tensor_at
from simplefsdp.step.whole_graph import note_loss, whole_step

log = logging.getLogger("simplefsdp")


class StepResult(NamedTuple):
    """What a training step gives.

    Attributes:
        loss: that the step began with, 0-d, of this rank, without a gradient.
        grad_norm: norm of all gradients over all ranks before clipping, 0-d; None without clipping.
    """

    loss: Tensor
    grad_norm: Tensor | None


def compile_step(
    loss_of: Callable[..., Tensor],
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., StepResult]:
    """A training step that is compiled, and planned, as one program.

    ::

        def loss_of(tokens, targets):
            return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

        step = simplefsdp.compile_step(loss_of, optimizer, max_norm=1.0)
        loss, grad_norm = step(tokens, targets)

    It does what these lines do::

        loss = loss_of(tokens, targets)
        loss.backward()
        grad_norm = simplefsdp.clip_grad_norm_(parameters of the optimizer, max_norm)
        optimizer.step()
        optimizer.zero_grad()

    Gradients are never seen: ``.grad`` is None before and after. Gradients that micro-batches left
    (:func:`simplefsdp.microbatch`) are taken along. Learning rates may change from step to step; a
    new number for any other option of the optimizer compiles anew. What is loaded into model and
    optimizer counts from the next step on.

    Args:
        loss_of: computes the loss, 0-d, from the arguments of a step, with wrapped models that are
            not compiled by themselves.
        optimizer: of ``torch.optim``, or one whose ``step`` ``torch.compile`` can follow.
        max_norm: clip the gradients to this norm; None: they are not clipped.
        options: those of the backend.

    Raises:
        ValueError: when it is called: gradients are there already, hooks wait for them, the
            optimizer cannot be compiled, or a gradient does not reach a parameter that it trains.
    """
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, or None, got {max_norm!r}")
    return _Step(loss_of, optimizer, max_norm, options).__call__


class _Step:
    """Compiled steps, one for each set of hyperparameters that there was."""

    def __init__(
        self,
        loss_of: Callable[..., Tensor],
        optimizer: Optimizer,
        max_norm: float | None,
        options: Mapping[str, object] | None,
    ) -> None:
        self.loss_of, self.optimizer, self.max_norm = loss_of, optimizer, max_norm
        self.options = options
        self.compiled: list[_Compiled] = []

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        self._check()
        try:
            return self._of_now().call(*args, **kwargs)
        except CountsDiffer:
            self.compiled.remove(self._of_now())
            return self._of_now().call(*args, **kwargs)
        except updates.MakesState:
            log.info("the first step is not compiled: %s makes its state there", self._name)
            return self._uncompiled(*args, **kwargs)

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def _of_now(self) -> _Compiled:
        """The step for what the optimizer's hyperparameters are now."""
        wanted = hyperparameters(self.optimizer)
        for known in self.compiled:
            if known.update.hyperparameters == wanted:
                return known
        update = capture(self.optimizer)
        scalars = scalars_of(self.optimizer, update)
        self.compiled.append(_Compiled(self.optimizer, update, scalars, self.max_norm))
        self.compiled[-1].compile(self.loss_of, self.options)
        return self.compiled[-1]

    def _uncompiled(self, *args: Any, **kwargs: Any) -> StepResult:
        optimizer, norm = self.optimizer, None
        with torch.enable_grad():
            loss = self.loss_of(*args, **kwargs)
            loss.backward()
        if self.max_norm is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            norm = clip_grad_norm_(params, self.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return StepResult(loss.detach(), norm)

    def _check(self) -> None:
        """Refuse what a step would pass over in silence."""
        ours = __name__.partition(".")[0]
        for hook in updates.step_hooks(self.optimizer):
            if not (getattr(hook, "__module__", None) or "").startswith(ours):
                raise ValueError(
                    f"optimizer: the hook {getattr(hook, '__qualname__', hook)} is to be called at "
                    "each step, which a compiled step does not do; remove it, or compile the model "
                    "alone"
                )
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None or _torch.has_hooks(param):
                    what = "has a gradient" if param.grad is not None else "has hooks"
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)} {what}, which a compiled step "
                        "would pass over: call optimizer.zero_grad() before it, and remove hooks; "
                        "micro-batches leave their gradients by simplefsdp.microbatch"
                    )


class _Compiled:
    """A step for one set of hyperparameters."""

    def __init__(
        self, optimizer: Optimizer, update: Update, scalars: Scalars, max_norm: float | None
    ) -> None:
        self.optimizer, self.update, self.scalars = optimizer, update, scalars
        self.max_norm = max_norm
        self.norm: Tensor | None = None

    def compile(self, loss_of: Callable[..., Tensor], options: Mapping[str, object] | None) -> None:
        def loss(*args: Any, **kwargs: Any) -> Tensor:
            return note_loss(loss_of(*args, **kwargs))

        loss = _torch.with_own_code(loss, f"{loss_of!r} {id(self)}")
        backend = partial(simplefsdp, options=options, extend=self.extend)
        self.loss = torch.compile(loss, backend=backend, fullgraph=True)

    def call(self, *args: Any, **kwargs: Any) -> StepResult:
        with torch.enable_grad():
            loss = self.loss(*args, **kwargs)
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        expect_writes(params)
        note_reduced(params)
        updates.note_step(self.optimizer)
        norm, self.norm = self.norm, None
        return StepResult(loss, norm)

    def extend(self, gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the backend compiles instead of the graph of the loss."""
        fqns = {id(param): fqn for fqn, param in living_shards()}
        whole = whole_step(
            gm,
            inputs,
            self.optimizer,
            self.update,
            self.scalars,
            max_norm=self.max_norm,
            fqns=fqns,
        )

        numbers = Numbers(self.optimizer, self.scalars, whole.trained)

        def called(code: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                values = numbers.compute()
                own = [tensor_at(self.optimizer, site) for site in whole.sites]
                results = code(*args, *own, *(values[i] for i in whole.numbers), whole.seed)
                numbers.write(values)
                if self.max_norm is not None:
                    *results, self.norm = results
                return results

            return call

        return whole.gm, whole.inputs, called
