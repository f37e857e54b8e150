"""Passes over TorchInductor's IR that bucket and reorder collectives.

The core works on :class:`~inductor_passes.program.Program` and does not import torch: ``program``,
``text``, ``cost``, ``simulate``, ``buckets``, ``merge``, ``order``. The adapters read and write
torch's graphs: ``fx``, ``scheduler``, and ``passes``, which holds what the compiler calls.

This package knows nothing of ``simplefsdp``, which imports it.
"""
