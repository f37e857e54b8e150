"""Inspection: what the compiler did with a model's collectives, what is exposed, and why.

``simplefsdp inspect`` (``command``) traces a step without allocating memory, plans it, and
simulates it on any cluster. The report has a row for each bucket (``explain``): when its transfer
starts, when it is needed, what is computed meanwhile, and how long compute waits for it. Exposed
time is split by reason; the reason, what it means, and what helps against it:

================  =============================================  ================================
first use         the graph starts with this gather, or ends     a smaller first (last) bucket
                  with this reduce
prefetch limit    the wire was idle, but the bucket's window or  ``bucketing``
                  place in the graph kept it from starting
memory budget     likewise, and its bytes would not have fitted  ``memory_budget_gb``, a smaller
                                                                 batch, recomputation
wire-bound        earlier transfers kept the wire busy           more compute per rank
dependency        it began as soon as its input was computed     nothing here
================  =============================================  ================================

``torch_passes`` predicts PyTorch's own passes on the same graph. ``capture`` implements
``simplefsdp.inspect()``, for use in a program. ``profile``, ``matching``, ``align`` and
``measured`` read a profile of real steps. ``report``, ``tables``, ``page`` (HTML), ``document``
(JSON), ``perfetto`` and ``diff`` show the results.
"""
