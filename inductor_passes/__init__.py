"""Passes over TorchInductor's IR that bucket and reorder collectives.

Each folder imports only those above it. ``ir`` to ``planner`` do not import torch.

1. ``ir``: the :class:`~inductor_passes.ir.program.Program`, on which everything else works.
2. ``transform``: collectives merged into buckets, and moved. A program becomes a program.
3. ``machine``: what a machine is, and the time and memory that a program takes on it.
4. ``planner``: which buckets, and when each starts, by that machine and a memory budget.
5. ``adapters``: FX graphs and Inductor's nodes as programs, and back. ``adapters._torch`` holds
   every private part of PyTorch; ``tests/adapters/test_passes_contract.py`` is its contract.
6. ``executor``: layers that are alike are compiled once, and called in the planned order.

``rehearsal`` says what the passes will do to a graph, ``passes`` is what the compiler calls, and
``size_range`` tells for which sizes a plan holds. ``python -m inductor_passes program.txt`` prints
what each pass makes of a program.

This package knows nothing of ``simplefsdp``, which imports it.
"""
