"""Decides by a rule which matmuls Inductor pads, so that all ranks decide alike.

Inductor pads matrices whose rows do not begin at multiples of 16 bytes (with a vocabulary of 50257,
say), if the matmul is faster so. It times both variants, on each rank, for the joint graph. Ranks
could measure differently, partition different graphs, and then launch different collectives.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._inductor import config

from inductor_passes.adapters._torch import size_hint

log = logging.getLogger("simplefsdp")

_ALIGNED_NBYTES = 16
# Padding copies an operand. With 989 TFLOP/s and 3.35 TB/s, reading and writing one element takes
# as long as 590 multiply-adds. An unaligned matmul is assumed to take thrice as long as an aligned
# one (not measured). So padding saves two multiply-adds per use of an element, and pays from about
# 300 uses on.
_USES_OF_COPY = 300


@contextmanager
def padding_without_benchmarks() -> Iterator[None]:
    """Inside, Inductor asks :func:`_should_pad` which matmuls to pad, unless padding is off."""
    from torch._inductor.fx_passes import pad_mm

    _tell_what_is_not_asked()
    with patch.object(pad_mm, "_should_pad", _should_pad):
        yield


def _should_pad(
    match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None = None
) -> bool:
    """Whether to pad a matmul in which some size is not aligned. The user's settings still hold:
    ``force_shape_pad``, ``deterministic`` (nothing is padded) and ``pad_aten_mm_pass``; with
    ``shape_padding=False`` this is not called at all."""
    from torch._inductor.fx_passes import pad_mm

    if config.force_shape_pad:
        return True
    if config.deterministic:  # torch would use timings that it has kept on this machine's disk
        return False
    m, k, n = (size_hint(size) for size in (*mat1.shape[-2:], mat2.shape[-1]))
    always = "pad_aten_mm_pass" in config.post_grad_fusion_options
    if always and pad_mm.should_pad_mm_bf16(mat1.dtype, m, n, k):
        return True
    step = _ALIGNED_NBYTES // mat1.dtype.itemsize
    if all(row % step == 0 for row in (_row(mat1), _row(mat2), n)):
        return False
    odd_m, odd_k, odd_n = (_is_odd(size, step) for size in (*mat1.shape[-2:], mat2.shape[-1]))
    copied = m * k * (odd_m or odd_k) + k * n * (odd_k or odd_n)
    return m * k * n >= _USES_OF_COPY * copied


def _is_odd(size: Any, step: int) -> bool:
    """Whether a size would be padded: symbolic sizes and 1 are not."""
    return isinstance(size, int) and size != 1 and size % step != 0


def _row(matrix: Tensor) -> int:
    """Elements from one row to the next in memory; if columns are contiguous, from column to
    column."""
    strides = [size_hint(stride) for stride in matrix.stride()[-2:]]
    return max(strides) if min(strides) == 1 else size_hint(matrix.shape[-1])


def _tell_what_is_not_asked() -> None:
    """Warn of user settings that have no effect here, because they only matter for timing."""
    if "shape_padding_multiplier" in config.post_grad_fusion_options:
        _say_not_used("post_grad_fusion_options['shape_padding_multiplier']")
    if config.run_autoheuristic("pad_mm") and not config.deterministic:
        _say_not_used("autoheuristic for pad_mm")


@functools.cache  # once
def _say_not_used(setting: str) -> None:
    log.warning(
        "torch._inductor.config: %s: not used. The ranks' graphs must be the same, so matmuls are "
        "not timed to find out which to pad. Set force_shape_pad to pad all, or shape_padding to "
        "False to pad none",
        setting,
    )
