"""Torch's initialisers of parameters that draw into a tensor other than the parameter."""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor, nn


def filled_by_trunc_normal() -> Tensor | None:
    """The tensor that ``trunc_normal_`` is filling, if this is called from inside of it; else None.
    ``trunc_normal_`` redraws rejected values into another tensor before it copies them there."""
    filling = nn.init._no_grad_trunc_normal_.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not filling:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["tensor"]
