"""Passes over TorchInductor's IR that bucket and reorder collectives.

The core works on :class:`~inductor_passes.program.Program` and does not import torch. Read the code
in this order:

1. ``program`` and ``text``: ops, buffers, collectives, and their rules; printed and parsed.
2. ``buckets``, ``merge``, ``order``: which collectives go together, as one, and when each starts.
3. ``cost``, ``cluster``, ``links``, ``presets``, ``cluster_file`` (by ``json_file``): what a
   machine is, and what an op costs on it; ``simulate`` a timeline of a program, with its memory;
   ``bound`` a time that no plan beats; ``fusion`` which bytes reach memory.
4. ``auto``, the planner: ``segments``, what it decides about; ``glue`` and ``compact``, the program
   that it tries plans on; ``regular``, where it begins; ``moves`` and ``local_search``, how it goes
   on. ``greedy``, the published rule; ``keep``, which parameters to keep from forward to backward;
   ``packing``, which members share a buffer.
5. The adapters: ``fx`` and ``layouts`` read and write FX graphs, ``scheduler`` Inductor's nodes,
   ``roofline``, ``loops`` and ``attention`` tell what a node computes. ``copies`` writes those
   around a bucket, with the operators of ``packs``, whose kernel is ``pack_kernels``;
   ``in_place``, ``matmuls`` and ``unrounded`` change a graph before it is planned.
6. ``rehearsal`` says what the passes will do to a graph, ``passes`` is what the compiler calls,
   ``verify`` what a pass must leave alone. ``regional``, ``regions``, ``straight_line`` and
   ``units`` compile layers that are alike once. ``sizes``, ``cells`` and ``grid`` have a program
   for many sizes, ``size_range`` where a plan holds.

``_torch`` holds every private part of PyTorch; ``tests/test_passes_contract.py`` is its contract.
This package knows nothing of ``simplefsdp``, which imports it.
"""
