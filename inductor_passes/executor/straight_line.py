"""The program above the regions: call after call, each value dropped after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch.fx import GraphModule, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import run_by_itself
from inductor_passes.adapters._torch_code import is_kept_code
from inductor_passes.adapters.submodules import attribute_of
from inductor_passes.executor.regions import Region

Compiled = Callable[[list[Any]], Any]
_LITERALS = (bool, int, str, type(None))


def straight_line(
    gm: GraphModule, pieces: Sequence[Node | Region], code_of: Callable[[Region], Compiled]
) -> Compiled:
    """A function that runs ``pieces``, of a list of arguments, which it empties.

    Its attribute ``source`` is the Python code that it runs.

    Args:
        gm: the graph.
        pieces: what :func:`inductor_passes.executor.regions.cut` made of it.
        code_of: compiles a region.
    """
    writer = _Writer(gm, pieces)
    plain = _torch.can_go_below_autograd(gm)
    return StraightLine(writer.source(code_of), writer.scope, plain)


class StraightLine:
    """A program of calls. ``source`` is its Python code, ``scope`` has the functions and constants
    that the code names, and ``plain`` says whether it :func:`can_go_below_autograd`."""

    def __init__(self, source: str, scope: Mapping[str, Any], plain: bool) -> None:
        self.source, self.scope, self.plain = source, scope, plain
        made = dict(scope)
        exec(compile(source, "<simplefsdp regions>", "exec"), made)
        self._ordered = made["run"]
        self._boxed_call = True  # torch's mark of a function that empties its list of arguments
        # torch keeps code that has a key. It can be kept if Inductor has a key of each region.
        keys = [code._fx_graph_cache_key for code in self.codes()]
        self._fx_graph_cache_key = None if None in keys else "regions"

    def __call__(self, args: list[Any]) -> Any:
        # Run in the dtypes for which regions were compiled: AOTAutograd leaves backward's autocast
        # on.
        with _torch.no_autocast(), _torch.below_autograd() if self.plain else nullcontext():
            return self._ordered(args)

    def __reduce__(self) -> tuple[Any, ...]:
        return StraightLine, (self.source, self.scope, self.plain)

    def codes(self) -> list[Any]:
        """The compiled code of the regions, without repetition."""
        return list({id(v): v for v in self.scope.values() if is_kept_code(v)}.values())


class _Writer:
    def __init__(self, gm: GraphModule, pieces: Sequence[Node | Region]) -> None:
        self.gm, self.pieces = gm, pieces
        self.name = {node: f"v{i}" for i, node in enumerate(gm.graph.nodes)}
        self.output = gm.graph.output_node()
        self.scope: dict[str, Any] = {}
        self.last = self._last_uses()

    def source(self, code_of: Callable[[Region], Compiled]) -> str:
        inputs = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        lines = ["def run(args):"]
        lines += [f"    {', '.join(self.name[n] for n in inputs)}, = args"] if inputs else []
        lines += ["    args.clear()", *self._dropped(n for n in inputs if n not in self.last)]
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                self.scope[self.name[node]] = attribute_of(node)
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, Node):
                lines += self._call_node(i, piece)
            else:
                lines += self._call_region(i, piece, code_of(piece))
        lines.append(f"    return {self._text(self.output.args[0])}")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[Node, int]:
        """The index of the piece after which each value is not needed any more."""
        last: dict[Node, int] = {}
        for i, piece in enumerate(self.pieces):
            made = [piece] if isinstance(piece, Node) else list(piece.outputs)
            used = piece.all_input_nodes if isinstance(piece, Node) else piece.inputs
            last.update(dict.fromkeys((*made, *used), i))
        last.update(dict.fromkeys(self.output.all_input_nodes, len(self.pieces)))
        return last

    def _dropped(self, nodes: Iterable[Node]) -> list[str]:
        names = [self.name[node] for node in nodes if node.op != "get_attr"]
        return [f"    del {', '.join(names)}"] if names else []

    def _call_node(self, i: int, node: Node) -> list[str]:
        function, call = f"f{i}", run_by_itself(node)
        self.scope[function] = call.target
        arguments = [self._text(a) for a in call.args]
        arguments += [f"{key}={self._text(value)}" for key, value in call.kwargs.items()]
        line = f"    {self.name[node]} = {function}({', '.join(arguments)})  # {call.target}"
        used = dict.fromkeys((*node.all_input_nodes, node))
        return [line, *self._dropped(n for n in used if self.last[n] == i)]

    def _call_region(self, i: int, region: Region, code: Compiled) -> list[str]:
        function = f"f{i}"
        self.scope[function] = code
        lines = [f"    a = [{', '.join(self.name[n] for n in region.inputs)}]"]
        lines += self._dropped(n for n in region.inputs if self.last[n] == i)
        made = "".join(f"{self.name[n]}, " for n in region.outputs)
        lines.append(f"    {made and made + '= '}{function}(a)")
        return lines

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.name[value]
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._text(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            ends = map(self._text, (value.start, value.stop, value.step))
            return f"slice({', '.join(ends)})"
        if type(value) in _LITERALS:
            return repr(value)
        key = f"c{len(self.scope)}"
        self.scope[key] = value
        return key
