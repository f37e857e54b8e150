"""What a machine is, and what a program takes on it.

Read ``cost`` first: it defines what a cost model is. ``cluster`` computes costs from a machine's
peaks, memory and ``links``, which ``presets`` give for known devices, ``estimate`` for other GPUs,
and ``cluster_file`` for measured ones. ``simulate`` runs a program on paper, for its time and
memory; ``bound`` is a time that no schedule beats. ``fusion`` and ``stored`` tell which bytes reach
memory once loops are fused, ``attention`` what attention computes, ``packing`` which members of a
bucket share a buffer. ``grid`` prices many sizes at once.

This is the only model of time and memory there is. Nothing here makes a plan.
"""
