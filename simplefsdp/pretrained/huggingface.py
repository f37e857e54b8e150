"""What is specific to models of transformers: names, conversions, and configuration files.

``transformers`` is imported only for its own models, which have imported it already.
"""

import copy
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("simplefsdp")

NameOf = Callable[[str], tuple[str, bool]]
Revert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def is_transformers(module: object) -> bool:
    """Whether ``module`` is a model of transformers."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def names_in_model(model: Any, tensors: Mapping[str, Tensor]) -> NameOf:
    """A function from a name in a file to the model's name, and to whether the model has the tensor
    merged with others.

    Files keep the names of earlier releases, may be of the model with or without its head, and hold
    experts one by one.
    """
    if not is_transformers(model):
        return lambda name: (name, False)
    from transformers import conversion_mapping, core_model_loading

    conversions: list[Any] = conversion_mapping.get_model_conversion_mapping(model)
    mergers = [c for c in conversions if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in conversions if not isinstance(c, core_model_loading.WeightConverter)]
    prefix = str(model.base_model_prefix) or None

    def name_of(name: str) -> tuple[str, bool]:
        if name in tensors:
            return name, False
        key, merger = core_model_loading.rename_source_key(
            name, renamings, mergers, prefix, dict(tensors)
        )
        return key, merger is not None

    return name_of


def may_be_missing(model: nn.Module) -> Callable[[str], bool]:
    """A function that says whether a name of the model may be missing from the files."""
    return _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None))


def may_be_unexpected(model: nn.Module) -> Callable[[str], bool]:
    """A function that says whether a name in a file may be ignored."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if is_transformers(model):  # buffers that earlier releases saved
        patterns += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return _matcher(patterns)


def _matcher(patterns: Any) -> Callable[[str], bool]:
    found = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in found)


def not_saved(model: nn.Module) -> Callable[[str], bool]:
    """A function that says whether a name of the model is left out when it is saved."""
    return _matcher(getattr(model, "_keys_to_ignore_on_save", None))


def tied_names(model: nn.Module) -> set[str]:
    """Names of tied tensors that files do not have, as they have another name of the tensor."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def as_in_files(model: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Revert | None]:
    """The model's tensors by their names in files; and a function that converts full tensors in
    memory to those that files hold, as by splitting experts, or None if no conversion is needed."""
    if not is_transformers(model):
        return tensors, None
    from transformers import conversion_mapping, core_model_loading

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as revert_weight_conversion does
        known = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in known if not isinstance(c, core_model_loading.PrefixChange)]

    def revert(some: dict[str, Tensor]) -> dict[str, Tensor]:
        return core_model_loading.revert_weight_conversion(model, some)

    if any(isinstance(c, core_model_loading.WeightConverter) for c in conversions):
        return tensors, revert
    return (revert(tensors) if conversions else tensors), None


def write_configs(model: Any, folder: Path) -> None:
    """Write ``config.json`` and, for a model that generates, ``generation_config.json``. Only a
    model of transformers has them."""
    if not is_transformers(model):
        if hasattr(model, "save_pretrained"):
            log.warning(
                "%s is no model of transformers: weights are written, and nothing else that its "
                "from_pretrained may read; for all of it, have rank 0 call its own save_pretrained "
                "inside `with simplefsdp.unsharded(model):`",
                type(model).__name__,
            )
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
