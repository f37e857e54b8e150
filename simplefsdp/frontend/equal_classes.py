"""Our subclass of a module's class equals that class.

A model may ask in its forward whether ``type(block) == Block``, or ``type(layer) in (nn.Linear,)``,
or look its class up in a dict; an initialiser does so in torch's own example of ``Module.apply``.
Under FSDP2 the answer is that of the plain model, except for modules that were themselves given to
``fully_shard``. To ``type(block) is Block`` such modules, and ours, answer no.
"""

from __future__ import annotations

import functools
from typing import Any

from simplefsdp.frontend.wrapped import PLAIN_CLASS


class _Mro(tuple[type, ...]):
    """A method resolution order whose ``index`` finds a class by identity. Dynamo looks a class up
    by ``index`` for ``super()``, and our subclass equals the class that it was made from."""

    def index(self, cls: object, *ends: Any) -> int:
        found = next((i for i, one in enumerate(self) if one is cls), None)
        return super().index(cls, *ends) if found is None else found


def _plain(cls: type) -> type:
    return vars(cls).get(PLAIN_CLASS, cls)  # type: ignore[no-any-return]


@functools.cache
def equal_to_plain(metaclass: Any) -> Any:
    """``metaclass``, for classes that equal, and hash as, the class they were made from."""

    def __eq__(cls: type, other: object) -> Any:
        return cls is other or metaclass.__eq__(_plain(cls), other)

    def __hash__(cls: type) -> int:
        return metaclass.__hash__(_plain(cls))  # type: ignore[no-any-return]

    def __mro__(cls: type) -> tuple[type, ...]:
        return _Mro(type.__dict__["__mro__"].__get__(cls))

    def __subclasscheck__(cls: type, sub: type) -> bool:
        return sub is cls or metaclass.__subclasscheck__(cls, sub)  # type: ignore[no-any-return]

    members: dict[str, Any] = {"__eq__": __eq__, "__hash__": __hash__, "__mro__": property(__mro__)}
    if metaclass.__subclasscheck__ is not type.__subclasscheck__:  # it caches answers, as ABCMeta
        members["__subclasscheck__"] = __subclasscheck__
    try:
        return type(metaclass)(metaclass.__name__, (metaclass,), members)
    except TypeError:  # the metaclass does not let itself be inherited from like this
        return metaclass
