"""From shards to one rank: the plain model's state dict, or a folder that transformers reads."""

import re
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simplefsdp.pretrained import huggingface
from simplefsdp.pretrained.named import refuse_meta, state_of, wrapped_model
from simplefsdp.pretrained.send import into, send
from simplefsdp.pretrained.together import together
from simplefsdp.pretrained.writer import Writer, complete_folder, in_files
from simplefsdp.rank_guard import ranks_of_params
from simplefsdp.words import few

_WHAT = "what save_pretrained does"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The plain model's ``state_dict()``, with full tensors on the CPU, on the first rank.

    The other ranks get an empty dict, and never hold the full tensors. Tied parameters are one
    tensor under several names. Collective: all ranks must call it.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`.

    Raises:
        ValueError: ``model`` is not wrapped, or has no values.
        RankMismatchError: another rank failed, or has another model.
    """
    model = wrapped_model(model)
    ranks = ranks_of_params(model.parameters())
    state = state_of(model)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    receiver = _receiver(ranks)
    with together("the model given to full_state_dict", ranks) as lines:
        refuse_meta(tensors)
        lines.extend(_lines(tensors))
        fulls = _room_for(tensors, receiver)
    _fill(fulls, tensors, receiver)
    if dist.get_rank() != receiver:
        return {}
    return {name: fulls.get(id(value), value) for name, value in state.items()}


def save_pretrained(
    model: nn.Module, folder: str | PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write a folder that the plain model's ``from_pretrained``, or load_pretrained, reads.

    The first rank writes safetensors files and, for a model of transformers, ``config.json`` and
    ``generation_config.json``. Rows go from the shards to the file a few at a time, so that no rank
    holds a full parameter. (If transformers stores the tensors of a model in another form, such as
    experts, the first rank holds those of one file.) A tied parameter is written once. The folder
    appears complete or not at all. Collective: all ranks must call it; if it fails on one rank, it
    fails on all.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`.
        folder: where to write, as the first rank sees it; must not exist, or be empty.
        max_shard_size: of a file: bytes, or a text such as ``"5GB"``. A file may only be larger if
            it has a single tensor.

    Raises:
        ValueError: ``model`` is not wrapped, has no values, or has something that safetensors
            files cannot hold; ``folder`` holds something.
        RankMismatchError: another rank failed, or has another model.
    """
    model = wrapped_model(model)
    ranks = ranks_of_params(model.parameters())
    target = Path(folder).absolute()
    receiver = _receiver(ranks)
    with ExitStack() as stack:
        with together("what save_pretrained is about to write", ranks) as lines:
            tensors, revert = huggingface.as_in_files(model, _to_write(model))
            limit = _nbytes(max_shard_size)
            lines.extend([*_lines(tensors), f"max_shard_size={limit}"])
            writer = None
            if dist.get_rank() == receiver:
                writer = Writer(stack.enter_context(complete_folder(target)))
        for batch in in_files(tensors.items(), limit):
            if revert is None:
                _write_pieces(batch, writer, ranks)
            else:
                _write_reverted(batch, writer, ranks, revert)
        with together(_WHAT, ranks):
            if writer is not None:
                writer.finish()
                huggingface.write_configs(model, writer.folder)
            stack.close()


def _write_pieces(batch: dict[str, Tensor], writer: Writer | None, ranks: tuple[int, ...]) -> None:
    """Write one file while its rows arrive."""
    with ExitStack() as stack:
        with together(_WHAT, ranks):  # opening the file may fail
            write = None if writer is None else stack.enter_context(writer.file(batch))
        # Errors are raised only when all rows have arrived, since the other ranks send them anyway.
        errors: list[Exception] = []

        def take(name: str, first: int, rows: Tensor) -> None:
            if write is not None and not errors:
                try:
                    write(name, first, rows)
                except Exception as error:
                    errors.append(error)

        for name, tensor in batch.items():
            send(tensor, _receiver(ranks), partial(take, name))
        with together(_WHAT, ranks):
            if errors:
                raise errors[0]
            stack.close()


def _write_reverted(
    batch: dict[str, Tensor],
    writer: Writer | None,
    ranks: tuple[int, ...],
    revert: huggingface.Revert,
) -> None:
    """Write one file of the tensors that transformers stores for those of ``batch``."""
    receiver = _receiver(ranks)
    with together(_WHAT, ranks):  # allocating memory may fail
        fulls = _room_for(batch, receiver)
    _fill(fulls, batch, receiver)
    with together(_WHAT, ranks):
        if writer is not None:
            writer.write(revert({name: fulls[id(tensor)] for name, tensor in batch.items()}))


def _to_write(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to write, each once, by the name that files have for it."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"model: this {type(model).__name__} has adapters of PEFT; save those by "
            "simplefsdp.integrations.peft.save_pretrained(model, folder)"
        )
    left_out, tied = huggingface.not_saved(model), huggingface.tied_names(model)
    state = {name: value for name, value in state_of(model).items() if not left_out(name)}
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{few(others)}: is no tensor (extra state of a module), which safetensors files "
            "cannot hold; save it yourself, and drop get_extra_state"
        )
    refuse_meta(state)
    main: dict[int, str] = {}
    for name, tensor in sorted(state.items(), key=lambda item: item[0] in tied):
        main.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in state.items() if main[id(tensor)] == name}


def _lines(tensors: dict[str, Tensor]) -> list[str]:
    return [f"{name}: {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]


def _receiver(ranks: tuple[int, ...]) -> int:
    """The first of ``ranks``; this rank if ``ranks`` is empty, as with fake process groups."""
    return min(ranks, default=dist.get_rank())


def _room_for(tensors: dict[str, Tensor], receiver: int) -> dict[int, Tensor]:
    """Empty full tensors by the id of the sharded one, on the receiving rank; {} on the others."""
    if dist.get_rank() != receiver:
        return {}
    return {id(t): torch.empty(t.shape, dtype=t.dtype) for t in tensors.values()}


def _fill(fulls: dict[int, Tensor], tensors: dict[str, Tensor], receiver: int) -> None:
    for key, tensor in {id(t): t for t in tensors.values()}.items():
        send(tensor, receiver, into(fulls.get(key, torch.empty(0))))


def _nbytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?)B?", str(size).strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"max_shard_size: expected bytes, or such as '5GB', got {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])
