"""To import torch and its compiler: for a launcher and its ranks the most of what a start takes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from inductor_passes.garbage import no_garbage_collection


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python looks for no garbage, nor later in what was imported by then.

    It would look through all of it each time that it has grown by a quarter: for 0.6 s of 3.7 s.
    """
    with no_garbage_collection():
        yield
        gc.freeze()
