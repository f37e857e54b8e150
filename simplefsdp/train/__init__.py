"""The reference trainer: ``simplefsdp train``, ``export`` and ``verify``.

Bad options, files or data raise a ValueError, which the commands print as one line.
"""
