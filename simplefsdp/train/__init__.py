"""The reference trainer: ``simplefsdp train`` and ``simplefsdp export``."""
