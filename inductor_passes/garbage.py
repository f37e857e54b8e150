"""Python's garbage collector, off while many objects are made that live; imports no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the collector off inside the block. A pass makes many small objects that stay alive; to
    look for garbage among them, the collector would walk the compiler's whole heap again and
    again, and the time of a pass would grow with the square of the model's size."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
