"""Faster imports of torch and its compiler, which take most of the start of a launcher or rank."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from inductor_passes.garbage import no_garbage_collection


@contextmanager
def importing() -> Iterator[None]:
    """Inside, garbage collection is off; later collections skip the objects that exist by then.

    Otherwise Python would go through all objects each time their number has grown by a quarter,
    which takes 0.6 s of 3.7 s.
    """
    with no_garbage_collection():
        yield
        gc.freeze()
