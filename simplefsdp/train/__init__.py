"""The reference trainer: ``simplefsdp train`` and ``simplefsdp export``."""

from simplefsdp.train.restore import load_plain

__all__ = ["load_plain"]
