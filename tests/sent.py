"""Counts collectives as they run, compiled or not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class Sent:
    """From ``start`` to ``stop``, which gives their numbers by name."""

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.__enter__()

    def stop(self) -> Counter[str]:
        self._profile.__exit__(None, None, None)
        events = self._profile.events()
        # One inside another is how the other is done: see simplefsdp/_torch/gloo.py.
        outer = [e for e in events if _is_functional(e) and not _is_functional(e.cpu_parent)]
        names = [event.name.partition("::")[2] for event in outer]
        return Counter(name for name in names if not name.startswith("wait"))


def _is_functional(event: Any) -> bool:
    return event is not None and event.name.startswith("_c10d_functional::")
