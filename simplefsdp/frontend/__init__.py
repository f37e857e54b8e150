"""The wrap: parameters become shards, and reading one in ``forward`` gathers it.

Read ``wrap`` first, then ``placement`` (where shards live), ``parametrization`` (reading one is a
gather) and ``gather`` (with its backward, the reduce), which asks ``tensor_class`` where a class of
tensors says how it is gathered. ``accumulation`` defers reduces, of which
``waiting`` misses none; ``kept`` keeps full parameters, and ``control`` is FSDP2's methods for
both. ``init_flow``, ``initialize``, ``full_parameters`` with ``slots`` and ``buffers``,
``outside``, ``full_tensor``, ``after_wrap``, ``reading``, ``recurrent`` and ``refused`` make the
habits of FSDP2's users work outside of forward, or refuse them by name.

Nothing here knows how a graph is compiled.
"""
