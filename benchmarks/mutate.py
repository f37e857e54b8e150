"""Changes of files at random: bits, pieces, and values in their structure."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[random.Random, bytes], bytes]
_TOKENS = (
    b"null", b"[[", b"]]", b"{", b'"', b"9" * 400, b"9" * 5000, b"1e309", b"-1", b"NaN", b"\\u0000",
    b"1e-320", b"true", b"\x00", b"\xff\xff\xff\xff", b"cposix\nsystem\n",
    b"(X\x01\x00\x00\x00xtR.",
    b"r\xff\xff\xff\x7f", b"\x85" * 50, b"\x8d" + b"\xff" * 7 + b"\x7f", b"../", b"[" * 2000,
)  # fmt: skip
_VALUES = (
    None, True, -1, 0, 2**63, 10**30, 0.5, 1e308, 1e-320, float("nan"), float("inf"), "",
    "x" * 3000,
    "\0", "../x", [], {}, [[]], [None], {"a": 1}, [1, "a", None], "\x1b[31m[/b]",
)  # fmt: skip


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change bits, or pieces."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice([1, 2, 8, 100]))
    kind = rng.randrange(7)
    if kind == 0 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + data[at:end] * rng.choice([2, 50]) + data[end:]
    if kind == 4:
        return data[:at] + rng.randbytes(end - at) + data[end:]
    token = rng.choice(_TOKENS)
    return data[:at] + token + data[at if kind == 5 else at + len(token) :]


def change_json(rng: random.Random, data: bytes) -> bytes:
    """Replace, remove or repeat a value."""
    value = json.loads(data)
    parents = list(_containers(value))
    parent = rng.choice(parents)
    key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.extend(parent[key : key + 1] * rng.choice([1, 2000]))
    elif kind == 2 and isinstance(parent, dict):
        parent[rng.choice([*parent, "more"])] = parent[key]
    else:
        parent[key] = rng.choice(_VALUES)
    return json.dumps(value).encode()


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)) and value:
        yield value
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _containers(inner)


class _Runs:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


def change_metadata(rng: random.Random, data: bytes) -> bytes:
    """Replace an attribute of something in the metadata, which is ours so far."""
    metadata = pickle.loads(data)
    entries = list(metadata.state_dict_metadata.values())
    places = list(metadata.storage_data.values())
    tensors = [e for e in entries if hasattr(e, "chunks")]
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    owner = rng.choice([metadata, *tensors, *chunks, *places])
    name = rng.choice(list(vars(owner)))
    values = [*_VALUES, torch.Size([2**40]), torch.Size([-1]), torch.Size([]), _Runs(), torch.int8]
    object.__setattr__(owner, name, rng.choice(values))
    return pickle.dumps(metadata, rng.choice([2, 4, 5]))
