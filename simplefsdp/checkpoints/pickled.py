"""Reads plain data out of a pickle without running anything in it.

A pickle is a program for a small stack machine, and may call anything. The machine here is the
standard library's, restricted to the instructions that build data. Where a pickle would make an
instance of a class, or call a function, a :class:`Record` of that request is made instead. A class
or function that the caller does not expect is an error. So the memory and the time that reading
takes are bounded by the size of the pickle.
"""

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, NamedTuple

# The unpickler in Python, whose memo is a dict. In C the memo is an array, for which an index of 32
# bits would allocate gigabytes.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]

# The instructions that `pickle.dump` writes, in protocols 2 to 5, for data and for instances of
# dataclasses; without those that `_Reader` implements itself.
_DATA = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_LIST APPEND APPENDS EMPTY_DICT MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "GLOBAL STACK_GLOBAL BUILD"
)


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An instance that a pickle would make, or a call that it would do: the class or function, the
    arguments, and the state that would be set afterwards."""

    of: Named
    args: tuple[Any, ...]
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise pickle.UnpicklingError("a second state")
        self.state = state


def read_pickle(data: bytes, known: Collection[Named]) -> Any:
    """The data in a pickle: None, bools, ints, strs, lists, tuples, dicts, :class:`Named`, Records.

    Raises:
        ValueError: the pickle names a class that is not in ``known``, or is damaged.
    """
    try:
        return _Reader(BytesIO(data), known).load()
    except ValueError:
        raise
    except Exception as error:  # it is truncated, or has an instruction that builds no data
        raise ValueError("it is damaged") from error


def _code(name: str) -> int:
    return ord(getattr(pickle, name))


class _Reader(_Unpickler):
    def __init__(self, file: BytesIO, known: Collection[Named]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Named:
        named = Named(module, name)
        if named not in self._known:
            raise ValueError(f"it asks for {str(named)[:200]!r}, which no metadata needs")
        return named

    def call(self) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        if type(of) is not Named or type(args) is not tuple:
            raise pickle.UnpicklingError("a call of what is no function")
        self.append(Record(of, args))  # args as they are: many calls may refer to one long tuple

    def fill(self, items: list[Any]) -> None:
        # Hashing a deeply nested tuple would crash the process.
        if not all(type(key) in (str, int, Record) for key in items[::2]):
            raise pickle.UnpicklingError("a key that is neither a name nor a number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill([key, value])

    def set_items(self) -> None:
        self.fill(self.pop_mark())

    dispatch: ClassVar = {
        **{_code(name): _Unpickler.dispatch[_code(name)] for name in _DATA.split()},
        _code("REDUCE"): call,
        _code("NEWOBJ"): call,
        _code("SETITEM"): set_item,
        _code("SETITEMS"): set_items,
    }
