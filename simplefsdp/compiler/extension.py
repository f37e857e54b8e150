"""What another package has the backend compile in the place of a Dynamo graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

Call = Callable[..., Any]


class Extension(NamedTuple):
    """Makes a whole training step of the graph of a loss, see :mod:`simplefsdp.step`.

    Attributes:
        agreed: what must be the same on all ranks, line by line.
        extend: of a Dynamo graph and its inputs gives the graph to compile, its inputs, and what
            makes of its code a function that is called as the Dynamo graph would be.
    """

    agreed: Sequence[str]
    extend: Callable[
        [GraphModule, Sequence[Any]], tuple[GraphModule, Sequence[Any], Callable[[Call], Call]]
    ]
