"""To import torch and its compiler: for a launcher and its ranks the most of what a start takes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python looks for no garbage, nor later in what was imported by then.

    It would look through all of it each time that it has grown by a quarter: for 0.6 s of 3.7 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
