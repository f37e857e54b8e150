"""The wrap: parameters become shards, and reading one in ``forward`` gathers it.

Read ``wrap`` first, then ``placement`` (where shards live), ``parametrization`` (reading a
parameter is a gather), then ``gather`` and its backward, ``reduce``; ``gather_spec`` has what both
are told. ``shard_dims`` says which dimension is sharded, ``post_forward_groups`` between whom parts
are gathered again, ``tensor_class`` asks a class of tensors that says itself how it is gathered.
``accumulation`` defers reduces, and ``waiting`` refuses to go on without them; ``kept`` keeps full
parameters; ``control`` has FSDP2's methods for both.
``init_flow``, ``initialize``, ``full_parameters`` with ``slots`` and ``buffers``, ``outside``,
``full_tensor``, ``after_wrap``, ``plain_values`` and ``plain_state`` with ``loaded``, ``reading``,
``recurrent``, ``hints`` and ``refused`` make the habits of FSDP2's users work outside of forward,
or refuse them by name.

Nothing here knows how a graph is compiled.
"""
