"""Models and optimizers in one distributed checkpoint: each rank writes and reads its own shards.

Names are those of torch's own checkpoints, ``model.<fqn>`` and ``optimizer.state.<fqn>.<name>``, so
that a plain model, or any number of ranks, can load the files. A second model is ``model_1``, and
so on.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from simplefsdp.checkpoints.metadata import NAME as METADATA
from simplefsdp.checkpoints.opened import CheckpointFiles, fill, open_files, verify
from simplefsdp.checkpoints.saving import ChecksumWriter
from simplefsdp.frontend.full_parameters import full_of
from simplefsdp.frontend.wrapped import is_wrapped
from simplefsdp.rank_guard import agree, ranks_of_params

log = logging.getLogger("simplefsdp")
FOLDER = "simplefsdp"  # the folder for shards, in a library's own checkpoint folder


def has_wrapped(model: nn.Module) -> bool:
    """Whether ``model``, or a part of it, was wrapped by simple_fsdp."""
    return any(is_wrapped(module) for module in model.modules())


def save(
    folder: Path | str,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer] = (),
    *,
    frozen: bool = True,
) -> None:
    """Write ``models``, wrapped or not, and ``optimizers`` of their parameters; every rank must
    call it. ``frozen=False`` leaves out parameters that do not require a gradient."""
    values = _values_of(models, frozen)
    for key, optimizer in _keyed(optimizers):
        names = _names(optimizer, models)
        for param, state in optimizer.state.items():
            values |= {f"{key}.state.{names[param]}.{name}": v for name, v in state.items()}
        for i, group in enumerate(optimizer.param_groups):
            named = {**group, "params": [names[param] for param in group["params"]]}
            values |= {f"{key}.param_groups.{i}.{name}": v for name, v in named.items()}
    _agree(f"what is saved to {Path(folder).name}", models, values)
    save_state_dict(values, storage_writer=ChecksumWriter(folder))


def load(folder: Path | str, models: Sequence[nn.Module], *, frozen: bool = True) -> None:
    """Fill ``models``, which must be built as for :func:`save`; every rank must call it."""
    values = _values_of(models, frozen)
    files = _opened(folder)
    _check_keys(folder, files.metadata.state_dict_metadata, values)
    _agree(f"what is loaded from {Path(folder).name}", models, values)
    _fill_verified(files, values)
    for i, model in enumerate(models):
        prefix = _numbered("model", i) + "."
        own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        model.load_state_dict(own, strict=False)


def load_optimizers(
    folder: Path | str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Fill ``optimizers``, which need not have state yet; every rank must call it."""
    files = _opened(folder)
    stored = files.metadata.state_dict_metadata
    values: dict[str, Any] = {}
    for key, optimizer in _keyed(optimizers):
        params = {name: param for param, name in _names(optimizer, models).items()}
        for full, entry in stored.items():
            if full.startswith(f"{key}."):
                owner, name = _parts(full)
                values[full] = _empty_for(entry, params.get(owner), name)
    _agree(f"what is loaded from {Path(folder).name}", models, values)
    _fill_verified(files, values)
    for key, optimizer in _keyed(optimizers):
        states, groups = (_nested(values, f"{key}.{of}.") for of in ("state", "param_groups"))
        _fill(folder, optimizer, _names(optimizer, models), states, groups)


def gathered(model: nn.Module, values: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather ``values`` of the state of ``model`` to full tensors on the CPU, on ranks that
    ``keep`` them; others get an empty dict. Every rank must call it."""
    _agree("what is gathered of the model", [model], values)
    fulls: dict[int, Any] = {}  # by id: tied parameters stay one tensor
    for value in values.values():
        if id(value) not in fulls:
            full = full_of(value) if isinstance(value, DTensor) else value
            if isinstance(full, Tensor):
                full = full.detach().cpu() if keep else None
            fulls[id(value)] = full
    return {key: fulls[id(value)] for key, value in values.items()} if keep else {}


def _agree(what: str, models: Sequence[nn.Module], keys: Iterable[str]) -> None:
    """Raise on all ranks if one does not get here, or has other ``keys``: it would hang later."""
    params = (param for model in models for param in model.parameters())
    agree(what, sorted(keys), ranks_of_params(params), remember=False)


def _numbered(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name


def _keyed(optimizers: Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    return [(_numbered("optimizer", i), optimizer) for i, optimizer in enumerate(optimizers)]


def _names(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """The name of each parameter of ``optimizer`` in a checkpoint."""
    known: dict[Tensor, str] = {}
    for i, model in enumerate(models):
        prefix = f"{_numbered('model', i)}." if i else ""
        for fqn, param in model.named_parameters():
            known.setdefault(param, prefix + fqn)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if param not in known:
            raise ValueError(
                f"optimizer: its parameter of shape {tuple(param.shape)} is none of the models'; "
                "make the optimizer after simple_fsdp, of parameters of models that are saved"
            )
    return {param: known[param] for param in params}


def _values_of(models: Sequence[nn.Module], frozen: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, model in enumerate(models):
        for fqn, value in model.state_dict(keep_vars=True).items():
            is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            if frozen or not is_frozen:
                plain = value.detach() if isinstance(value, Tensor) else value
                found[f"{_numbered('model', i)}.{fqn}"] = plain
    return found


def _opened(folder: Path | str) -> CheckpointFiles:
    if not Path(folder, METADATA).exists():
        raise ValueError(
            f"checkpoint {folder} is not complete: it has no .metadata; resume from an earlier one"
        )
    return open_files(Path(folder))


def _fill_verified(files: CheckpointFiles, values: dict[str, Any]) -> None:
    """Compare the files with their checksums, then fill ``values`` from them; on all ranks."""
    note = verify(files, lambda n, of: log.info("verifying %s: %.0f %%", files.path, 100 * n / of))
    if note:
        log.warning("%s", note)
    fill(files, values)


def _check_keys(folder: Path | str, stored: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    heads = {key.split(".")[0] for key in tensors}
    extra = {key for key in stored if key.split(".")[0] in heads} - tensors.keys()
    for key, value in tensors.items():
        size = getattr(stored.get(key), "size", None)
        if key not in stored or (isinstance(value, Tensor) and size != value.shape):
            has = f"{list(size)} for" if size is not None else "no"
            shape = list(value.shape) if isinstance(value, Tensor) else "not a tensor"
            raise ValueError(
                f"checkpoint {folder} is of another model: it has {has} {key}, which is {shape}"
            )
    if extra:
        raise ValueError(
            f"checkpoint {folder} is of another model: it has {min(extra)}, which this one has not"
        )


def _parts(key: str) -> tuple[str, str]:
    """``(<fqn>, <name>)`` of the key ``optimizer.state.<fqn>.<name>``, and ``(<number>, <name>)``
    of ``optimizer.param_groups.<number>.<name>``."""
    owner, _, name = key.rpartition(".")
    return owner.split(".", 2)[2], name


def _empty_for(entry: Any, param: Tensor | None, name: str) -> Any:
    """An empty value to be filled: a shard, if the stored tensor has the parameter's shape."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if param is not None and entry.size == param.shape and name != "step":
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def _nested(values: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """The values whose keys begin with ``prefix``, by FQN or number, and then by name."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            owner, name = _parts(key)
            found.setdefault(owner, {})[name] = value
    return found


def _fill(
    folder: Path | str,
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    states: Mapping[str, dict[str, Any]],
    groups: Mapping[str, dict[str, Any]],
) -> None:
    """Call ``optimizer.load_state_dict``, which identifies parameters by numbers, with states and
    groups that identify them by names."""
    ours = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    theirs = [groups[str(i)]["params"] for i in range(len(groups))]
    if ours != theirs:
        raise ValueError(
            f"checkpoint {folder}: its optimizer has {[len(g) for g in theirs]} parameters in its "
            f"groups, this one {[len(g) for g in ours]}, or others of the same number; make the "
            "optimizer as it was made then"
        )
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    number = dict(zip(chain(*ours), chain(*numbers), strict=True))
    optimizer.load_state_dict(
        {
            "state": {number[fqn]: state for fqn, state in states.items()},
            "param_groups": [groups[str(i)] | {"params": own} for i, own in enumerate(numbers)],
        }
    )
