"""The options of ``torch.compile(model, backend="simplefsdp", options={...})``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

Bucketing = Literal["none"]
Executor = Literal["inductor", "aot_eager"]


def _one_of(*choices: str) -> Mapping[str, tuple[str, ...]]:
    return {"choices": choices}


@dataclass(frozen=True)
class Options:
    """What the user may choose of a compilation.

    Attributes:
        bucketing: ``"none"``: every parameter is gathered and reduced by itself.
        executor: ``"inductor"`` generates code; ``"aot_eager"`` runs the forward and backward
            graphs op by op, which compiles in seconds and serves debugging.
    """

    bucketing: Bucketing = field(default="none", metadata=_one_of("none"))
    executor: Executor = field(default="inductor", metadata=_one_of("inductor", "aot_eager"))


def parse_options(options: Mapping[str, object] | None) -> Options:
    """Check the dictionary that ``torch.compile`` was given.

    Raises:
        TypeError: ``options`` is not a mapping.
        ValueError: unknown key or value; names the valid ones.
    """
    if options is None:
        return Options()
    if not isinstance(options, Mapping):
        raise TypeError(f"options: expected a dict, got {type(options).__name__}")
    known = {f.name: f.metadata["choices"] for f in fields(Options)}
    for key, value in options.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"options: unknown key {key!r}{hint} (valid keys: {', '.join(sorted(known))})"
            )
        if value not in known[key]:
            raise ValueError(
                f"options[{key!r}]: expected one of {', '.join(map(repr, known[key]))}, "
                f"got {value!r}"
            )
    return Options(**options)  # type: ignore[arg-type]
