"""Lightning and Fabric: the strategy ``"simplefsdp"``, once this module is imported.

``Trainer(strategy="simplefsdp")`` and ``Fabric(strategy="simplefsdp")`` wrap the model over all
processes and compile it. Models may be made under ``init_module(empty_init=True)``; accumulation,
clipping and checkpoints are Lightning's own::

    import simplefsdp.integrations.lightning

    Trainer(strategy="simplefsdp", accumulate_grad_batches=4).fit(LitModel())

The strategies take what ``simple_fsdp`` and ``torch.compile`` take::

    Trainer(strategy=TrainerStrategy(mp_policy=policy, options={"bucketing": "manual"}))
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerModelParallel
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from simplefsdp._torch import is_compiled
from simplefsdp.frontend.accumulation import microbatch
from simplefsdp.frontend.arguments import without_override
from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.frontend.parametrization import cast_in_forward
from simplefsdp.frontend.shard_dims import PlacementFn
from simplefsdp.frontend.wrap import simple_fsdp
from simplefsdp.frontend.wrapped import POLICY, is_wrapped

_Strategy: Any = object  # of Lightning, one or the other


class _OverAllProcesses(_Strategy):
    """The part that both strategies share: the mesh, wrapping, and compiling."""

    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def __init__(
        self,
        *,
        mp_policy: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool | int | Literal["auto"] = True,
        shard_placement_fn: PlacementFn | None = None,
        compile: bool = True,
        options: Mapping[str, Any] | None = None,
        **lightning: Any,
    ) -> None:
        """``mp_policy``, ``reshard_after_forward`` and ``shard_placement_fn`` are as for
        ``simple_fsdp``. ``compile``: compile modules that are not compiled yet, with the backend's
        ``options``. Other arguments are Lightning's."""
        super().__init__(**lightning)
        self._policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        self._reshard_after_forward = reshard_after_forward
        self._shard_placement_fn = shard_placement_fn
        self._compile = compile
        self._options = dict(options or {})

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def _wrap(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not is_wrapped(module):
            simple_fsdp(
                module,
                mesh["data_parallel"],
                mp_policy=self._policy,
                reshard_after_forward=self._reshard_after_forward,
                shard_placement_fn=self._shard_placement_fn,
            )
        return module

    def _compile_unless_it_is(self, module: nn.Module) -> None:
        if self._compile and not is_compiled(module):
            module.compile(backend="simplefsdp", options=self._options)


class FabricStrategy(_OverAllProcesses, FabricModelParallel):
    """Fabric's ``"simplefsdp"``: wraps and compiles the module that ``setup`` is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(parallelize_fn=self._wrap, **settings)
        self._backward_sync_control = _Deferring()

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        self._compile_unless_it_is(module)
        return module

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(
            self.precision.main_params(optimizer),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )


class _Deferring(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return microbatch(module, is_last=not enabled)


class TrainerStrategy(_OverAllProcesses, TrainerModelParallel):
    """The Trainer's ``"simplefsdp"``: wraps the LightningModule and compiles its submodules.

    The step itself is not compiled, because it logs. ``configure_model`` is not needed; modules
    that were wrapped or compiled there are left as they are.
    """

    def setup(self, trainer: Any) -> None:
        Strategy.setup(self, trainer)  # ModelParallelStrategy.setup would require configure_model

    def model_to_device(self) -> None:
        module: Any = self.lightning_module
        if not is_wrapped(module):
            self._wrap(module, self.device_mesh)
            for part in _called(module):
                if POLICY not in part.__dict__:
                    cast_in_forward(part, without_override(self._policy))
                self._compile_unless_it_is(part)
        _materialize_distributed_module(module, self.root_device)
        super().model_to_device()
        self.barrier()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        module: Any = self.lightning_module
        with microbatch(module, is_last=False):
            yield


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that have parameters and a forward, which containers do not have."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child


_DESCRIPTION = "simple_fsdp over all processes"
STRATEGY_REGISTRY.register("simplefsdp", FabricStrategy, _DESCRIPTION)
StrategyRegistry.register("simplefsdp", TrainerStrategy, _DESCRIPTION)
