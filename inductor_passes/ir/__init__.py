"""Programs: ops, the buffers that they read and write, and the collectives among them.

Read ``program`` first, then ``text``, which prints and parses it: the language of the tests.
``buckets`` says which collectives go together, ``verify`` what a pass must leave alone, ``lineage``
which op stems from which collective. ``sizes`` and ``cells`` compute a program for sizes other than
those it was traced with; ``json_file`` reads files that may come from anybody.

Nothing here knows a machine, a plan or how PyTorch represents a graph.
"""
