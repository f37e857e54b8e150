"""Print and parse a :class:`Program`: ``parse(to_text(p)) == p``. The language of the tests.

    input  x: 64
    resident p: 16
    start  g(p) -> full: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=fc.weight
    wait   w(full) -> weight: 64 @full
    compute mm(x, weight) -> y: 64
    output y

One line per op, in order. Where a buffer first appears, its bytes follow; then ``/`` and the bytes
of an element if these are not 1; then ``@`` and the buffer whose storage it shares, if it does. An
op that writes a buffer again mutates it. A compute may end with the unit that it belongs to:
``| unit=2``. ``resident`` is an input that the caller keeps. ``#`` starts a comment. A name with
characters other than letters, digits and ``_ . - / : * +``, or with a ``:`` at its end, is written
as a JSON string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from inductor_passes.ir.json_file import shown
from inductor_passes.ir.program import (
    COLLECTIVE_KINDS,
    KINDS,
    Buffer,
    Collective,
    Kind,
    Op,
    Program,
    ProgramError,
)

_PLAIN = re.compile(r"[\w.\-/:*+]*[\w.\-/*+]")
_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"\s*(->|{_STRING}|[\w.\-/:*+]*[\w.\-/*+]|[(),:@|=])|\s*(#.*)?$")
# A collective's fields by their names in the text: attribute, type, and the default, which is not
# printed.
_FIELDS: dict[str, tuple[str, type, object]] = {
    "group": ("group", str, ""),
    "ranks": ("ranks", int, None),
    "nbytes": ("nbytes", int, None),
    "dtype": ("dtype", str, ""),
    "op": ("reduce_op", str, ""),
    "bucket": ("bucket", str, ""),
    "window": ("window", int, 0),
    "members": ("members", int, 1),
}


def to_text(program: Program) -> str:
    """The program, a line an op."""
    printed: set[str] = set()

    def declare(name: str) -> str:
        if name in printed:
            return _quote(name)
        printed.add(name)
        buffer = program.buffers[name]
        shares = f" @{_quote(buffer.storage)}" if buffer.storage != name else ""
        items = f"/{buffer.itemsize}" if buffer.itemsize != 1 else ""
        return f"{_quote(name)}: {buffer.nbytes}{items}{shares}"

    lines = []
    for name in program.inputs:
        kind = "resident" if name in program.resident else "input"
        lines.append(f"{kind} {declare(name)}")
    for op in program.ops:
        reads = ", ".join(map(_quote, op.reads))
        writes = ", ".join(map(declare, op.writes))
        line = f"{op.kind} {_quote(op.name)}({reads})" + (f" -> {writes}" if writes else "")
        line += _collective_text(op.collective) if op.collective else ""
        lines.append(line + (f" | unit={op.unit}" if op.unit else ""))
    lines += [f"output {_quote(name)}" for name in program.outputs]
    return "\n".join(lines) + "\n"


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _collective_text(c: Collective) -> str:
    fields = [
        f"{key}={_quote(str(value))}"
        for key, (name, _, left_out) in _FIELDS.items()
        if (value := getattr(c, name)) != left_out
    ]
    fqns = [f"fqns={', '.join(map(_quote, c.fqns))}"] if c.fqns else []
    return " | " + " ".join([c.kind, *fields, *fqns])


def parse(text: str) -> Program:
    """Read a program that :func:`to_text` or a person wrote, and verify it.

    Raises:
        ProgramError: with the line that cannot be read, or the rule the program breaks.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read(_tokens(line))
        except (ProgramError, ValueError, IndexError) as error:
            told = shown(line.strip())
            raise ProgramError(f"line {number}: {told}: {error!s:.300}") from error
    return Program(
        tuple(reader.ops),
        reader.buffers,
        tuple(reader.inputs),
        frozenset(reader.resident),
        tuple(reader.outputs),
    ).verify()


def _tokens(line: str) -> list[str]:
    tokens, at = [], 0
    while at < len(line):
        match = _TOKEN.match(line, at)
        if match is None:
            raise ProgramError(f"cannot read {line[at:]!r}")
        if match[1]:
            tokens.append(match[1])
        at = match.end() if match.end() > at else len(line)
    return tokens


class _Reader:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str] = []
        self.resident: list[str] = []
        self.outputs: list[str] = []
        self.tokens: list[str] = []

    def read(self, tokens: list[str]) -> None:
        if not tokens:
            return
        self.tokens = tokens
        word = self._take()
        if word in ("input", "resident"):
            self.inputs.append(self._declare())
            if word == "resident":
                self.resident.append(self.inputs[-1])
        elif word == "output":
            self.outputs.append(self._name())
        elif word in KINDS:
            self._op(word)
        else:
            expected = ", ".join(["input", "resident", "output", *KINDS])
            raise ProgramError(f"expected one of {expected}; got {word!r}")
        if self.tokens:
            raise ProgramError(f"unexpected {' '.join(self.tokens)!r} at the end")

    def _op(self, kind: Kind) -> None:
        name = self._name()
        self._expect("(")
        reads = self._list(self._name, end=")")
        self._expect(")")
        writes = self._list(self._declare) if self._skip("->") else ()
        collective, unit = None, 0
        if self._skip("|"):
            if self._skip("unit"):
                self._expect("=")
                unit = int(self._take())
            else:
                collective = self._collective()
        self.ops.append(Op(name, kind, reads, writes, collective, unit))

    def _collective(self) -> Collective:
        word = self._take()
        if word not in COLLECTIVE_KINDS:
            raise ProgramError(f"expected one of {', '.join(COLLECTIVE_KINDS)}; got {word!r}")
        fields: dict[str, str] = {}
        fqns: tuple[str, ...] = ()
        while self.tokens:
            key = self._take()
            self._expect("=")
            if key == "fqns":
                fqns = self._list(self._name)
            elif key in _FIELDS:
                fields[key] = self._name()
            else:
                raise ProgramError(f"unknown field {key!r} of a collective")
        missing = [key for key in ("ranks", "nbytes") if key not in fields]
        if missing:
            raise ProgramError(f"a collective needs {missing[0]}=, a number")
        values: dict[str, Any] = {
            name: of_type(fields[key]) if key in fields else left_out
            for key, (name, of_type, left_out) in _FIELDS.items()
        }
        return Collective(word, fqns=fqns, **values)

    def _declare(self) -> str:
        name = self._name()
        if self._skip(":"):
            if name in self.buffers:
                raise ProgramError(f"buffer {name} has its size already")
            nbytes, _, itemsize = self._take().partition("/")
            shared = self._name() if self._skip("@") else name
            storage = self.buffers[shared].storage if shared in self.buffers else shared
            self.buffers[name] = Buffer(name, int(nbytes), storage, int(itemsize or 1))
        elif name not in self.buffers:
            raise ProgramError(f"buffer {name} needs its bytes here, as in '{name}: 64'")
        return name

    def _list(self, item: Callable[[], str], end: str = "") -> tuple[str, ...]:
        items: list[str] = []
        while self.tokens and self.tokens[0] != end:
            items.append(item())
            if not self._skip(","):
                break
        return tuple(items)

    def _name(self) -> str:
        token = self._take()
        return str(json.loads(token)) if token.startswith('"') else token

    def _take(self) -> str:
        if not self.tokens:
            raise ProgramError("the line ends too early")
        return self.tokens.pop(0)

    def _skip(self, token: str) -> bool:
        found = bool(self.tokens) and self.tokens[0] == token
        if found:
            self.tokens.pop(0)
        return found

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise ProgramError(f"expected {token!r} before {' '.join(self.tokens)!r}")
