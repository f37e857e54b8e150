"""PyTorch's graphs as programs, and programs written back into them.

``fx`` reads and writes FX graphs, with ``layouts`` for how members travel in a bucket, ``copies``
for the nodes around it, by the operators of ``packs`` (on CUDA, ``pack_kernels``). ``scheduler``
does so for Inductor's nodes. ``roofline`` and ``loops`` tell what a node computes. ``in_place``,
``lookups``, ``matmuls``, ``scalars`` and ``unrounded`` change a graph before it is planned.

Only ``_torch``, ``_torch_calls`` and ``_torch_lowering`` touch private parts of PyTorch.
"""
