"""From a wrapped model on the meta device to initialised shards, the same on any number of ranks.

Each module's own ``reset_parameters`` runs once, on parameters that are DTensors of the global
shape, so that fan-in and the like come out right. Random numbers are drawn per block of rows of
the *global* tensor, each block from a generator seeded by (seed, FQN, draw, block): a rank draws
only the blocks that its shard touches, and every sharding reads the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from simplefsdp._torch import TorchDispatchMode
from simplefsdp.frontend import loaded
from simplefsdp.frontend.placement import dtensor_like, local_part, parameter_like, part_of
from simplefsdp.frontend.wrapped import is_wrapped, plain_classes
from simplefsdp.words import few

# Elements per block. Part of the mapping from seed to weights: changing it changes them all.
_BLOCK_NUMEL = 1 << 18

_aten = torch.ops.aten
RANDOM_FILLS = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
}


@torch.no_grad()
def init_weights(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Allocate the shards of a wrapped meta-device model and initialise them, in place.

    No rank ever holds more than its shards and one block of random numbers, and there is no
    communication. (Of a parameter that is sharded along another dimension than its first, each rank
    draws the numbers of all, block by block.) Call it before making the optimizer. The same seed
    gives the same global weights for any mesh, mode and number of ranks on one type of device; the
    global random state is left as it was.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`; parameters that are not on the meta
            device are initialised again, in place.
        device: where to allocate; default: the current device of the mesh's type.
        seed: of the random numbers.
        init_fn: called with each module, innermost first, while its parameters are DTensors and
            gradients are off; default: its ``reset_parameters()``. It must write parameters in
            place (``nn.init.*``, ``fill_``).

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` is not wrapped, a parameter or buffer was left uninitialised, or an
            initialiser wrote to a copy (a slice of a sharded parameter, say).
    """
    if not isinstance(model, nn.Module) or not is_wrapped(model):
        raise ValueError(
            f"model: expected a module wrapped by simple_fsdp, got {type(model).__name__}"
        )
    named = [(path, module) for path, module in model.named_modules() if is_wrapped(module)]
    with plain_classes(module for _, module in named):
        materialize(model, device)
        fill = _ShardedInit(model, seed)
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=cuda), fill:
            torch.manual_seed(seed)
            for path, module in reversed(named):
                fill.module = f"{path or 'root'} ({type(module).__name__})"
                (init_fn or reset_parameters)(module)
        fill.check_complete(model)
    return model


def reset_parameters(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        _reset_embedding(module, module.padding_idx)
        return
    # torch.nn.MultiheadAttention and Transformer spell it with an underscore.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _reset_embedding(module: nn.Embedding, padding_idx: int) -> None:
    """As the module does, but write the zero row to the shard: a row of a DTensor is a copy."""
    module.padding_idx = None
    try:
        module.reset_parameters()
    finally:
        module.padding_idx = padding_idx
    weight = module.weight
    if isinstance(weight, DTensor):
        row = padding_idx - shard_offsets(weight)[0]
        local = weight.to_local()
        if 0 <= row < local.shape[0]:
            local[row].zero_()


def materialize(model: nn.Module, device: torch.device | str | None) -> None:
    """Give every meta parameter and buffer memory; tied ones stay one object. All values of
    ``model`` are about to be made anew, alike on all ranks."""
    loaded.forget(model.parameters())
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor) and param.is_meta:
                if param not in made:
                    made[param] = _allocate(param, device)
                module._parameters[name] = made[param]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in made:
                    made[buffer] = torch.empty_like(buffer, device=device or _default(model))
                module._buffers[name] = made[buffer]


def _allocate(param: DTensor, device: torch.device | str | None) -> nn.Parameter:
    local = param.to_local()
    # At least one element, so that also an empty shard has an address to be known by.
    memory = torch.empty(
        max(local.numel(), 1), dtype=local.dtype, device=device or param.device_mesh.device_type
    )
    filled = memory[: local.numel()].view(local.shape)
    return parameter_like(param, dtensor_like(param, filled))


def _default(model: nn.Module) -> str:
    types = (p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor))
    return next(types, "cpu")


class _ShardedInit(TorchDispatchMode):
    """Sees every op that an initialiser runs: draws random fills, notes what was written."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.module = ""  # the one being initialised, for errors
        self.draws: dict[str, int] = {}
        self.filled = ""  # the parameter that was drawn last
        self.unwritten: dict[int, str] = {
            _address(tensor): fqn
            for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        self.fqns = dict(self.unwritten)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if alias is None or not alias.is_write or not isinstance(args[0], Tensor):
            self._refuse_unseeded(func, args)
            return self._run(func, args, kwargs)
        target = args[0]
        self.unwritten.pop(_address(target), None)
        if func not in RANDOM_FILLS or not isinstance(target, DTensor):
            return self._run(func, args, kwargs)
        # A tensor that is no parameter may hold values for one: trunc_normal_ draws again what it
        # rejects, on some ranks more often than on others. So draws are counted per parameter.
        if (fqn := self.fqns.get(_address(target))) is not None:
            self.filled, self.draws[f"after {fqn}"] = fqn, -1
        name = fqn or f"after {self.filled}"
        draw = self.draws[name] = self.draws.get(name, -1) + 1
        key = (self.seed, name, draw)
        fill_global(target, key, lambda t, g: func(t, *args[1:], generator=g))
        return target

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one, too
            if not any(isinstance(arg, DTensor) for arg in args):
                raise
            raise ValueError(
                f"init of {self.module}: {func} does not work on shards ({error}); initialise "
                "whole parameters in place (nn.init.normal_, uniform_, ...), pass init_fn, or "
                "call model.to_empty(device=...) and the model's own initialisation instead, "
                "which gets full parameters"
            ) from error

    def _refuse_unseeded(self, func: Any, args: tuple[Any, ...]) -> None:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and any(isinstance(arg, DTensor) for arg in args):
            raise ValueError(
                f"init of {self.module}: {func} draws random numbers that would depend on the "
                "number of ranks; draw into the parameter in place (nn.init.normal_, ...)"
            )

    def check_complete(self, model: nn.Module) -> None:
        """Raise unless every parameter, and every buffer still in place, was written to."""
        present = {_address(t) for t in [*model.parameters(), *model.buffers()]}
        missing = [fqn for address, fqn in self.unwritten.items() if address in present]
        if missing:
            raise ValueError(
                f"init: nothing initialised {few(missing)}; give the module that owns this "
                "parameter or buffer a reset_parameters() that writes it in place, or pass init_fn"
            )


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def fill_global(
    target: DTensor, key: tuple[object, ...], draw: Callable[[Tensor, torch.Generator], object]
) -> None:
    """Fill the local shard with its part of the global tensor that ``key`` stands for."""
    local = target.to_local()
    if local.numel() == 0:
        return
    if local.dim() == 0:
        draw(local, _generator(local.device, key, 0))
        return
    offsets = shard_offsets(target)
    columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], local.shape[1:], strict=True))
    rows, row_shape = target.shape[0], target.shape[1:]
    block_rows = max(1, _BLOCK_NUMEL // max(1, row_shape.numel()))
    begin, end = offsets[0], offsets[0] + local.shape[0]
    for block in range(begin // block_rows, -(-end // block_rows)):
        top, bottom = block * block_rows, min(rows, (block + 1) * block_rows)
        values = local.new_empty(bottom - top, *row_shape)
        draw(values, _generator(local.device, key, block))
        low, high = max(begin, top), min(end, bottom)
        local[low - begin : high - begin] = values[(slice(low - top, high - top), *columns)]


def _generator(device: torch.device, key: tuple[object, ...], block: int) -> torch.Generator:
    digest = hashlib.sha256(repr((*key, block)).encode()).digest()
    # 63 bits: what manual_seed takes on every device.
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shard_offsets(tensor: DTensor) -> list[int]:
    """Index of the local shard's first element along each dimension of the global tensor.

    Each mesh dimension from left to right splits what the one before it left.
    """
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            dim, ranks = placement.dim, tensor.device_mesh.size(mesh_dim)
            begin, sizes[dim] = part_of(sizes[dim], ranks, coordinate[mesh_dim])
            offsets[dim] += begin
    return offsets
