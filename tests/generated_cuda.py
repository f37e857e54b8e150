"""Read the code that Inductor generates around its kernels: what it launches, in which order."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

_KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all_reduce"}
_CALL = re.compile(r"def (partition_0|call)\(.*", re.DOTALL)  # of a CUDA graph, or of all
_START = re.compile(
    r"(?:(\w+) = )?torch\.ops\._c10d_functional\."
    r"(all_gather|reduce_scatter|all_reduce)\w*\.default\((.*)"
)
_ITEM = re.compile(r"(\w+) = (\w+)\[\d+\]$")
_WAIT = re.compile(r"_c10d_functional\.wait_tensor\.default\((?:reinterpret_tensor\()?(\w+)")
_PRODUCT = re.compile(
    r"extern_kernels\.(mm|addmm|bmm|baddbmm)\w*\(|torch\.ops\.aten\.(mm|bmm)\.dtype"
)
_ATTENTION = re.compile(r"\w+ = torch\.ops\.\S*(_scaled_dot_product_\w+\.default|with_rng_state)\(")
_ALLOCATED = re.compile(r"(\w+) = empty_strided\w*\((\([^)]*\)), (\([^)]*\))")
_TAKEN = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*# reuse$")
_KERNEL = re.compile(r"(triton_\w+)\.run\(")


def _lines(code: str) -> Iterator[str]:
    """The statements of the function that runs a graph."""
    call = _CALL.search(code)
    for line in (call[0] if call else "").splitlines():
        if not line.strip().startswith("#"):
            yield line.strip()


def events(code: str) -> list[str]:
    """Launches, waits, and computes that are not fused, in their order, in the words of
    ``cases.events_of``."""
    found: list[str] = []
    launch_of: dict[str, int] = {}  # by the name of a result
    launches = 0
    for line in _lines(code):
        if start := _START.match(line):
            name, kind, arguments = start.groups()
            inputs = _inputs(arguments)
            launch_of |= dict.fromkeys([name] if name else inputs, launches)  # or in place
            launches += 1
            found.append(f"{_KINDS[kind]} of {len(inputs)}")
        elif (item := _ITEM.match(line)) and item[2] in launch_of:
            launch_of[item[1]] = launch_of[item[2]]
        elif wait := _WAIT.search(line):
            found.append(f"wait for launch {launch_of[wait[1]]}")
        elif _PRODUCT.search(line):
            found.append("product")
        elif _ATTENTION.match(line):
            found.append("attention")
    return found


def _inputs(arguments: str) -> list[str]:
    """Names of what a collective sends; each is a buffer or a view of one."""
    listed = re.match(r"\[(.*?)\], ", arguments)
    text = listed[1] if listed else arguments
    names = re.findall(r"reinterpret_tensor\((\w+)|\b((?:buf|primals_|tangents_|arg)\w+)", text)
    found = [first or second for first, second in names]
    return found if listed else found[:1]


def padded(code: str) -> list[str]:
    """Buffers that a collective sends and whose rows do not lie densely."""
    dense: dict[str, bool] = {}
    sent: list[str] = []
    for line in _lines(code):
        if allocated := _ALLOCATED.match(line):
            shape, strides = ast.literal_eval(allocated[2]), ast.literal_eval(allocated[3])
            span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            dense[allocated[1]] = span == math.prod(shape)
        elif taken := _TAKEN.match(line):
            dense[taken[1]] = dense.get(taken[2], True)
        elif start := _START.match(line):
            sent += _inputs(start[3])
    return [name for name in sent if not dense.get(name, True)]


def kernels(code: str) -> list[str]:
    """Triton kernels, in the order in which they are launched."""
    return [name for line in _lines(code) for name in _KERNEL.findall(line)]


def collectives(program: str) -> list[str]:
    """Launches and waits, as in ``events``, of the program that runs regions."""
    found: list[str] = []
    launch_of: dict[str, int] = {}
    launches = 0
    for line in program.splitlines():
        if item := re.match(r"    (\w+) = \w+\((\w+), \d+\)  # <built-in function getitem>", line):
            if item[2] in launch_of:
                launch_of[item[1]] = launch_of[item[2]]
            continue
        call = re.match(r"    (\w+) = \w+\((.*)\)  # _c10d_functional\.(\w+)\.default$", line)
        if call is None:
            continue
        name, arguments, operator = call.groups()
        first = re.match(r"\[(.*?), \]|(\w+)", arguments)
        assert first is not None, line
        if operator == "wait_tensor":
            found.append(f"wait for launch {launch_of[first[2]]}")
            continue
        kind = next(kind for prefix, kind in _KINDS.items() if operator.startswith(prefix))
        launch_of[name] = launches
        launches += 1
        found.append(f"{kind} of {len(first[1].split(', ')) if first[1] else 1}")
    return found
