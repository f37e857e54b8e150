"""``compile_step``: forward, loss, backward, clipping and update as one compiled program."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim.optimizer import Optimizer

from simplefsdp import _torch, rank_guard
from simplefsdp._torch import updates
from simplefsdp.compiler.backend import simplefsdp
from simplefsdp.compiler.compilation import Extension
from simplefsdp.compiler.options import parse_options
from simplefsdp.frontend.accumulation import note_reduced
from simplefsdp.frontend.after_wrap import refuse_replaced
from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.frontend.kept import expect_writes
from simplefsdp.frontend.living import living_shards
from simplefsdp.frontend.plain_state import shard_plain_state
from simplefsdp.frontend.reading import name_of
from simplefsdp.frontend.waiting import refuse_waiting
from simplefsdp.step.hyperparameters import fingerprint, hyperparameters
from simplefsdp.step.scalars import CountsDiffer, Numbers, Scalars, scalars_of
from simplefsdp.step.update import Owner, Site, Update, capture, params_of, tensor_at
from simplefsdp.step.whole_graph import note_loss, whole_step

log = logging.getLogger("simplefsdp")
MOST = 8  # sets of hyperparameters that one step is compiled for


class StepResult(NamedTuple):
    """The results of a training step."""

    loss: Tensor  # before the update, on this rank; one number, detached
    # Norm of all gradients over all ranks before clipping, 0-d; None without clipping.
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

    Gradients are not visible outside of a step: ``.grad`` is None before and after. Gradients that
    earlier micro-batches left (:func:`simplefsdp.microbatch`) are added in. Learning rates may
    change from step to step; a new value of any other option of the optimizer recompiles. Values
    that are loaded into model and optimizer are used from the next step on.

    Args:
        loss_of: computes the loss, one number, from the arguments of a step, with wrapped models
            that are not compiled by themselves.
        optimizer: of ``torch.optim``, or one whose ``step`` ``torch.compile`` can trace.
        max_norm: clip the gradients to this norm; None: they are not clipped.
        options: those of the backend ``simplefsdp``.

    Raises:
        TypeError: ``optimizer`` is no optimizer; or, when a step is called, the loss no tensor.
        ValueError: ``max_norm`` is negative or NaN. Or, when a step is called: a parameter has a
            gradient or hooks; the optimizer cannot be compiled, or changes its options repeatedly;
            the loss reads a tensor that requires a gradient but is not trained; or no gradient
            reaches a parameter that is trained.
    """
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; of one "
            "that wraps another, pass that"
        )
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, or None, got {max_norm!r}")
    return _Step(loss_of, optimizer, max_norm, options).__call__


class _Step:
    """The compiled steps, one for each set of hyperparameters that the optimizer has had."""

    def __init__(
        self,
        loss_of: Callable[..., Tensor],
        optimizer: Optimizer,
        max_norm: float | None,
        options: Mapping[str, object] | None,
    ) -> None:
        self.loss_of, self.optimizer, self.max_norm = loss_of, optimizer, max_norm
        self.options = options
        self.timeout_s = parse_options(options).rank_guard_timeout_s
        self.compiled: list[_Compiled] = []
        self.last: tuple[list[object], _Compiled] | None = None
        # Parameters that got no gradient in the first step, if that one ran uncompiled.
        self.unread: set[Owner] = set()
        self.makes_state = False

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        self._check()
        try:
            result = self._of_now().call(*args, **kwargs)
        except CountsDiffer:
            self.compiled.remove(self._of_now())
            self.last = None
            result = self._of_now().call(*args, **kwargs)
        except updates.MakesState:
            return self._uncompiled(*args, **kwargs)
        self.makes_state = False  # it may make state again for a parameter that is added later
        return result

    def _of_now(self) -> _Compiled:
        """The compiled step for the optimizer as it is now, whatever values its tensors have."""
        now = fingerprint(self.optimizer)
        if self.last is None or self.last[0] != now:
            found = self._known() or self._compiled()
            self.last = fingerprint(self.optimizer), found
        return self.last[1]

    def _known(self) -> _Compiled | None:
        wanted = hyperparameters(self.optimizer)
        for known in self.compiled:
            if known.update.hyperparameters == wanted:
                return known
        if len(self.compiled) == MOST:
            before = self.compiled[-1].update.hyperparameters
            changed = [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]
            raise ValueError(
                f"optimizer: {changed[0]} has changed for the {MOST}th time, and the step was "
                "compiled each time; keep it (OneCycleLR(cycle_momentum=False)), or compile the "
                "model alone"
            )
        return None

    def _compiled(self) -> _Compiled:
        update = capture(self.optimizer, self.unread)
        scalars = scalars_of(self.optimizer, update)
        compiled = _Compiled(self.optimizer, update, scalars, self.max_norm)
        compiled.compile(self.loss_of, self.options)
        self.compiled.append(compiled)
        return compiled

    def _uncompiled(self, *args: Any, **kwargs: Any) -> StepResult:
        """Run one step without compiling it, in which the optimizer makes its state."""
        optimizer, norm, params = self.optimizer, None, params_of(self.optimizer)
        name = type(optimizer).__name__
        if self.makes_state:
            raise ValueError(
                f"optimizer: {name}.step() makes other tensors of its state each time; compile the "
                "model alone"
            )
        log.info("the first step is not compiled: %s makes its state there", name)
        if self.timeout_s:
            what = "a step that is not compiled, for the optimizer's state"
            ranks = rank_guard.ranks_of_params(params.values())
            rank_guard.agree(what, [name], ranks, self.timeout_s, remember=False)
        with torch.enable_grad():
            loss = self.loss_of(*args, **kwargs)
            loss.backward()
        if self.max_norm is not None:
            norm = clip_grad_norm_(params.values(), self.max_norm)
        self.unread = {owner for owner, param in params.items() if param.grad is None}
        optimizer.step()
        optimizer.zero_grad()
        self.makes_state = True
        return StepResult(loss.detach(), norm)

    def _check(self) -> None:
        """Refuse hooks and gradients that a compiled step would silently ignore."""
        if torch.is_inference_mode_enabled():
            raise ValueError("a step that trains cannot be made in inference mode; call it outside")
        refuse_replaced(self.optimizer)
        shard_plain_state(self.optimizer)
        ours = __name__.partition(".")[0]
        for hook in updates.step_hooks(self.optimizer):
            if str(getattr(hook, "__module__", "")).partition(".")[0] != ours:
                raise ValueError(
                    f"optimizer: the hook {getattr(hook, '__qualname__', hook)} is to be called at "
                    "each step, which a compiled step does not do; remove it, or compile the model "
                    "alone"
                )
        for param in params_of(self.optimizer).values():
            if param.grad is not None or _torch.has_hooks(param):
                what = "has a gradient" if param.grad is not None else "has hooks"
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} {what}, which a compiled step "
                    "would pass over: call optimizer.zero_grad() before it, and remove hooks; "
                    "micro-batches leave their gradients by simplefsdp.microbatch"
                )


class _Run(NamedTuple):
    """What a call of the code of a whole step needs; see :class:`WholeStep`."""

    computed: Numbers
    sites: list[Site]
    numbers: list[int]
    seed: Tensor
    trained: frozenset[Owner]


class _Compiled:
    """The compiled step for one set of hyperparameters."""

    def __init__(
        self, optimizer: Optimizer, update: Update, scalars: Scalars, max_norm: float | None
    ) -> None:
        self.optimizer, self.update, self.scalars = optimizer, update, scalars
        self.max_norm = max_norm
        self.norm: Tensor | None = None

    def compile(self, loss_of: Callable[..., Tensor], options: Mapping[str, object] | None) -> None:
        def loss(*args: Any, **kwargs: Any) -> Tensor:
            value = loss_of(*args, **kwargs)
            if isinstance(value, Tensor):
                return note_loss(value, "")
            return note_loss(None, _kind_of(value))

        loss = _torch.with_own_code(loss, f"loss by {name_of(loss_of)}")
        agreed = [f"a step of {type(self.optimizer).__name__}, max_norm {self.max_norm}"]
        me = weakref.ref(self)  # Dynamo keeps the backend, which must not keep this step alive

        def extend(gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
            return _there(me()).extend(gm, inputs)

        extension = Extension(agreed, extend)
        backend = partial(simplefsdp, options=options, extension=extension)
        self.loss = torch.compile(loss, backend=backend, fullgraph=True)

    def call(self, *args: Any, **kwargs: Any) -> StepResult:
        with torch.enable_grad(), updates.no_backward_inside():
            loss = self.loss(*args, **kwargs)
        updates.note_step(self.optimizer)
        norm, self.norm = self.norm, None
        return StepResult(loss, norm)

    def extend(self, gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The graph of the whole step, which the backend compiles instead of that of the loss; its
        inputs, and how its code is called as the graph of the loss would be."""
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
        # Dynamo keeps the code, which must hold neither a batch nor the optimizer: this step does.
        numbers = Numbers(self.scalars, whole.trained)
        run = _Run(numbers, whole.sites, whole.numbers, whole.seed, whole.trained)
        me = weakref.ref(self)

        def called(code: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: _there(me()).run(code, run, args)

        return whole.gm, whole.inputs, called

    def run(self, code: Callable[..., Any], of: _Run, args: tuple[Any, ...]) -> Any:
        """Run the compiled ``code`` of a whole step; gives the results of the graph of the loss."""
        params = params_of(self.optimizer)
        others = (param for owner, param in params.items() if owner not in of.trained)
        refuse_waiting(others, "a compiled step")
        values = of.computed.compute(self.optimizer)
        own = [tensor_at(self.optimizer, site) for site in of.sites]
        results = code(*args, *own, *(values[i] for i in of.numbers), of.seed)
        of.computed.write(self.optimizer, values)
        trained = [params[owner] for owner in of.trained]
        expect_writes(trained)
        note_reduced(trained)
        if self.max_norm is not None:
            *results, self.norm = results
        return results


def _kind_of(value: object) -> str:
    """The type name of a loss that is no tensor. Dynamo traces this, and in 2.11 cannot read the
    name of a class."""
    if value is None:
        return "NoneType"
    kinds = {"dict": dict, "tuple": tuple, "list": list, "float": float, "int": int}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "another object")


def _there(value: _Compiled | None) -> _Compiled:
    """The referent of a weak reference, which is alive as long as its caller holds the step."""
    if value is None:
        raise RuntimeError("a compiled step was called that nobody has any more")
    return value
