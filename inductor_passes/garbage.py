"""Python's garbage collector, off while many objects are made that live; imports no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A pass makes many small objects that live; to look for garbage among them, the collector
    would walk the compiler's whole heap time and again, and the time of a pass would grow with
    the square of the model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
