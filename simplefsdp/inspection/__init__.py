"""Inspection: what the compiler did with a model's collectives, what is exposed, and why.

``simplefsdp inspect`` (``command``) traces a step without memory, plans and simulates it on any
cluster. Each bucket has a row (``explain``): when its transfer starts, when it is needed, what
computes meanwhile, and how long compute stands still for it. The reasons, whose times add up to
what is exposed:

================  =============================================  ================================
first use         the graph starts with it, or its gradients     a smaller first (last) bucket
                  are the last
prefetch limit    the wire was idle, but its window or its       ``bucketing``
                  place let it start no sooner
memory budget     the same, and its bytes would not have fitted  ``memory_budget_gb``, a smaller
                                                                 batch, recomputation
wire-bound        earlier transfers kept the wire busy           more compute per rank
dependency        it began when its input was made               nothing here
================  =============================================  ================================

``torch_passes`` prices PyTorch's own passes on the same graph. ``capture`` is what
``simplefsdp.inspect()`` gives in a program; ``profile``, ``matching``, ``align`` and ``measured``
read a profile of real steps. ``report``, ``tables``, ``page`` (HTML), ``document`` (JSON),
``perfetto`` and ``diff`` show it.
"""
