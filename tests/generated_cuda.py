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
_ATTENTION = re.compile(
    r"\w+ = torch\.ops\.\S*(_scaled_dot_product_\w+\.default|with_rng_state)\("
    r"|triton_tem_\w*flex_attention\w*\.run\("
)
_SIZES = r"(\([^)]*\)), (\([^)]*\))"
_ALLOCATED = re.compile(rf"(\w+) = empty_strided\w*\({_SIZES}")
_ASSERTED = re.compile(rf"assert_(?:size_stride|tensor_metadata)\((\w+), {_SIZES}")
_ASSERTED_TOGETHER = re.compile(r"assert_size_stride_grouped\((.*)\)")  # since 2.15
_PACKED = re.compile(r"(\w+) = torch\.ops\.inductor_passes\.pack\.default\(")
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
    """Buffers that a collective sends and whose rows do not lie densely, or the view that it sends
    of one. A graph's inputs and what an operator returns are known by what is asserted of them.

    Raises:
        ValueError: the code does not say how a buffer lies.
    """
    dense: dict[str, bool] = {}
    found: list[str] = []
    for line in _lines(code):
        dense |= _lies(line, dense)
        if start := _START.match(line):
            for name, *view in _sent(start[3]):
                if name not in dense:
                    raise ValueError(f"how {name} lies is not known: {line}")
                found += [] if dense[name] and (not view or _is_dense(*view)) else [name]
    return found


def _lies(line: str, dense: dict[str, bool]) -> dict[str, bool]:
    """Whether buffers lie densely, of which a statement tells it."""
    if known := _ALLOCATED.match(line) or _ASSERTED.match(line):
        return {known[1]: _is_dense(known[2], known[3])}
    if together := _ASSERTED_TOGETHER.match(line):
        names, shapes, strides = (_elements(part) for part in _elements(together[1])[:3])
        return dict(zip(names, map(_is_dense, shapes, strides), strict=True))
    if packed := _PACKED.match(line):
        return {packed[1]: True}
    if (taken := _TAKEN.match(line)) and taken[2] in dense:
        return {taken[1]: dense[taken[2]]}
    return {}


def _is_dense(shape: str, strides: str) -> bool:
    pairs = list(zip(ast.literal_eval(shape), ast.literal_eval(strides), strict=True))
    return 1 + sum((n - 1) * stride for n, stride in pairs) == math.prod(n for n, _ in pairs)


def _elements(text: str) -> list[str]:
    """Of a tuple, or of what is between its parentheses."""
    parsed = ast.parse(text, mode="eval").body
    assert isinstance(parsed, ast.Tuple | ast.List), text
    return [ast.unparse(element) for element in parsed.elts]


def _sent(arguments: str) -> list[list[str]]:
    """Of what a collective sends, the name, and the shape and strides of a view."""
    call = ast.parse(f"f({arguments}", mode="eval").body
    assert isinstance(call, ast.Call), arguments
    first = call.args[0]
    return [
        [ast.unparse(part) for part in one.args[:3]] if isinstance(one, ast.Call) else [one.id]
        for one in (first.elts if isinstance(first, ast.List) else [first])
        if isinstance(one, ast.Call | ast.Name)
    ]


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
