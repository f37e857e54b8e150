"""Passes over TorchInductor's IR that bucket and reorder collectives.

There are none yet. This package will know nothing of ``simplefsdp``, which imports it, and its core
will not import torch.
"""
