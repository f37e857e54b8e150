"""Plain data out of a pickle, of which nothing is run.

A pickle is a program for a small stack machine, and may call anything. The machine here knows the
instructions that build data. Where a pickle makes an instance of a class, or calls a function, it
gets a :class:`Record` of what was asked for; a class or function that its reader does not expect
ends the reading. So the memory and the time that it takes are bounded by the pickle's size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An instance that a pickle would make, or a call: of what, with what, and its state then."""

    of: Named
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes, known: Collection[Named]) -> Any:
    """What ``data`` holds: None, bools, ints, strs, lists, tuples, dicts, :class:`Named`, Records.

    Raises:
        ValueError: it names a class that is not in ``known``, or it is damaged.
    """
    machine = _Machine(known)
    at = 0
    try:
        while (opcode := data[at]) != _STOP:
            argument, step = _INSTRUCTIONS[opcode]
            if argument is None:
                step(machine, None)
                at += 1
            else:
                value, at = argument(data, at + 1)
                step(machine, value)
        (value,) = machine.stack
    except (IndexError, KeyError) as error:
        # Cut short, if it has no STOP; or something that no data is made of, such as code.
        raise ValueError(f"it is damaged at byte {at} of {len(data)}") from error
    return value


class _Machine:
    def __init__(self, known: Collection[Named]) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Take everything off the stack that lies above the last mark."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise IndexError
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def take(self, n: int) -> list[Any]:
        """The upper ``n``, taken off the stack."""
        if n > len(self.stack):
            raise IndexError
        found = self.stack[len(self.stack) - n :]
        del self.stack[len(self.stack) - n :]
        return found

    def top(self, cls: type) -> Any:
        if type(self.stack[-1]) is not cls:
            raise KeyError
        return self.stack[-1]

    def name(self, module: object, name: object) -> None:
        named = Named(str(module), str(name))
        if named not in self.known:
            raise ValueError(f"it asks for {str(named)[:200]!r}, which no metadata needs")
        self.stack.append(named)


_Step = Callable[[_Machine, Any], None]


def _value(m: _Machine, arg: Any) -> None:
    m.stack.append(arg)


def _ignored(m: _Machine, arg: Any) -> None:
    del m, arg


def _mark(m: _Machine, arg: Any) -> None:
    m.marks.append(len(m.stack))


def _tuple(m: _Machine, arg: Any) -> None:
    m.stack.append(tuple(m.since_mark()))


def _append(m: _Machine, arg: Any) -> None:
    items = m.take(1)
    m.top(list).extend(items)


def _appends(m: _Machine, arg: Any) -> None:
    items = m.since_mark()
    m.top(list).extend(items)


def _set_item(m: _Machine, arg: Any) -> None:
    _fill(m, m.take(2))


def _set_items(m: _Machine, arg: Any) -> None:
    _fill(m, m.since_mark())


def _fill(m: _Machine, items: list[Any]) -> None:
    filled = m.top(dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, Record):  # the hash of a deep tuple would end the process
            raise KeyError
        filled[key] = value


def _remember(m: _Machine, arg: Any) -> None:
    m.memo[len(m.memo) if arg is None else arg] = m.stack[-1]


def _recall(m: _Machine, arg: Any) -> None:
    m.stack.append(m.memo[arg])


def _stack_global(m: _Machine, arg: Any) -> None:
    m.name(*m.take(2))


def _global(m: _Machine, arg: Any) -> None:
    m.name(*arg[:2])


def _call(m: _Machine, arg: Any) -> None:
    of, args = m.take(2)
    if type(of) is not Named or type(args) is not tuple:
        raise KeyError
    m.stack.append(Record(of, args))


def _build(m: _Machine, arg: Any) -> None:
    (state,) = m.take(1)
    record = m.top(Record)
    if record.state is not None:
        raise KeyError
    record.state = state


def _constant(value: Any) -> _Step:
    return lambda m, arg: m.stack.append(value)


def _tuple_of(n: int) -> _Step:
    return lambda m, arg: m.stack.append(tuple(m.take(n)))


_Argument = Callable[[bytes, int], tuple[Any, int]]


# What is cut short here ends behind the data, where there is no further instruction.
def _int(nbytes: int, signed: bool = False) -> _Argument:
    def read(data: bytes, at: int) -> tuple[int, int]:
        end = at + nbytes
        return int.from_bytes(data[at:end], "little", signed=signed), end

    return read


def _long(data: bytes, at: int) -> tuple[int, int]:
    end = at + 1 + data[at]
    return int.from_bytes(data[at + 1 : end], "little", signed=True), end


def _text(nbytes: int) -> _Argument:
    def read(data: bytes, at: int) -> tuple[str, int]:
        begin = at + nbytes
        end = begin + int.from_bytes(data[at:begin], "little")
        return data[begin:end].decode("utf-8", "surrogatepass"), end

    return read


def _two_lines(data: bytes, at: int) -> tuple[list[str], int]:
    end = data.find(b"\n", data.find(b"\n", at) + 1) + 1
    if end <= at:
        raise IndexError
    return data[at:end].decode().split("\n"), end


_STOP = ord(".")
_INSTRUCTIONS: dict[int, tuple[_Argument | None, _Step]] = {
    0x80: (_int(1), _ignored),  # PROTO
    0x95: (_int(8), _ignored),  # FRAME
    ord("N"): (None, _constant(None)),
    0x88: (None, _constant(True)),
    0x89: (None, _constant(False)),
    ord("J"): (_int(4, signed=True), _value),  # BININT
    ord("K"): (_int(1), _value),
    ord("M"): (_int(2), _value),
    0x8A: (_long, _value),  # LONG1
    ord("X"): (_text(4), _value),  # BINUNICODE
    0x8C: (_text(1), _value),
    ord("("): (None, _mark),
    ord(")"): (None, _constant(())),
    0x85: (None, _tuple_of(1)),
    0x86: (None, _tuple_of(2)),
    0x87: (None, _tuple_of(3)),
    ord("t"): (None, _tuple),
    ord("]"): (None, lambda m, arg: m.stack.append([])),
    ord("a"): (None, _append),
    ord("e"): (None, _appends),
    ord("}"): (None, lambda m, arg: m.stack.append({})),
    ord("s"): (None, _set_item),
    ord("u"): (None, _set_items),
    0x94: (None, _remember),  # MEMOIZE
    ord("q"): (_int(1), _remember),  # BINPUT
    ord("r"): (_int(4), _remember),
    ord("h"): (_int(1), _recall),  # BINGET
    ord("j"): (_int(4), _recall),
    ord("c"): (_two_lines, _global),
    0x93: (None, _stack_global),
    ord("R"): (None, _call),  # REDUCE
    0x81: (None, _call),  # NEWOBJ
    ord("b"): (None, _build),
}
"""All that ``pickle.dump`` writes, in protocols 2 to 5, for data and instances of dataclasses."""
