"""PyTorch's graphs as programs, and programs written back into them.

``fx`` reads and writes FX graphs. ``layouts`` writes how the members of a bucket travel, ``copies``
the copies into and out of a bucket, with the operators of ``packs`` (on CUDA, ``pack_kernels``).
``scheduler`` reads and orders Inductor's nodes. ``roofline`` and ``loops`` tell what a node
computes. ``in_place``, ``lookups``, ``matmuls``, ``scalars`` and ``unrounded`` change a graph
before it is planned.

Only the modules whose names begin with ``_torch`` touch private parts of PyTorch (``strides`` and
``scalars`` name a class of it each).
"""
