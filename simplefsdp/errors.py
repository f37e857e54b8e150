"""Errors that tell users what they did wrong, passed through Dynamo unchanged.

Dynamo reports whatever a backend raises as ``BackendCompilerFailed``, with advice on how to debug
the compiler. The exception to this are errors that carry the frame where the useful part of their
traceback begins (``ShortenTraceback``): our errors are turned into these as they leave the backend.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import inductor_passes
from inductor_passes.passes import PassError
from simplefsdp import _torch
from simplefsdp.rank_guard import RankMismatchError

log = logging.getLogger("simplefsdp")
P = ParamSpec("P")
R = TypeVar("R")

_FOR_USERS = (ValueError, TypeError, RankMismatchError, PassError)
_FOLDERS = tuple(str(Path(f).parent) for f in (__file__, str(inductor_passes.__file__)))


def told_plainly(backend: Callable[P, R]) -> Callable[P, R]:
    """Let errors that ``backend`` raises for its user pass through Dynamo: same type, same words.
    Errors raised by other code inside ``backend``, and bugs of ours, Dynamo reports as usual."""

    @functools.wraps(backend)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return backend(*args, **kwargs)
        except _FOR_USERS as error:
            if not _is_ours(error):
                raise
            plain = _torch.left_alone_by_dynamo(error, sys._getframe())
            raise plain.with_traceback(error.__traceback__) from error.__cause__
        except Exception as error:
            if _torch.breaks_the_graph(error):
                log.warning(
                    "graph break: %s. The code of this graph runs eagerly, and what it gathers is "
                    "not bucketed",
                    str(error).splitlines()[0],
                )
            raise

    return call


def _is_ours(error: BaseException) -> bool:
    """Whether a line of ``simplefsdp`` or ``inductor_passes`` raised ``error``."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename.startswith(_FOLDERS)
