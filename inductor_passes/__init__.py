"""Passes over TorchInductor's IR that bucket and reorder collectives.

Each folder imports only the folders before it in this list. ``ir`` to ``planner`` do not import
torch, except ``ir.cells`` and ``machine.grid``, which compute many sizes at once with tensors.

1. ``ir``: the :class:`~inductor_passes.ir.program.Program`, on which everything else works.
2. ``transform``: collectives merged into buckets, and moved. A program becomes a program.
3. ``machine``: what a machine is, and the time and memory that a program takes on it.
4. ``planner``: which buckets, and when each starts, by that machine and a memory budget.
5. ``adapters``: FX graphs and Inductor's nodes become programs, and programs are written back.
   ``adapters._torch`` and the modules named like it use private parts of PyTorch; the tests in
   ``tests/adapters/test_passes_contract.py`` say what these must do.
6. ``executor``: layers that are alike are compiled once, and called in the planned order.

``rehearsal`` says what the passes will do to a graph, ``passes`` is what the compiler calls, and
``size_range`` tells for which sizes a plan holds. ``python -m inductor_passes program.txt`` prints
what each pass makes of a program.

This package knows nothing of ``simplefsdp``, which imports it.
"""
