"""The reference trainer: ``simplefsdp train``, ``export`` and ``verify``.

What is wrong with options, files or data is told by a ValueError, of which commands make one line.
"""
