"""The backend of ``torch.compile``: from a graph of Dynamo's to code, the same on all ranks.

Read ``options`` and ``backend`` first: the user's options, what is checked of a graph, and that the
ranks agree on it (an extension: another graph in its place). ``dedupe`` leaves one gather per
parameter; ``recompute`` and ``reshard`` say which are made again in backward. ``compilation`` calls
the passes of ``inductor_passes`` for each graph, which ``observed`` plans (``plans``: one rank for
all) and logs (``census``; ``size_limits``, if sizes are open); or nothing is traced, as
``warm_start`` has the code, of an earlier process or of another rank (``by_one_rank``). Of layers
that are alike (``repeated_layers``) a few are traced: ``shorten`` puts a ``stand_in`` for the
others, ``lengthen`` takes it out again and puts them there, by ``deep_graph``. ``observers`` are
told of each graph that is compiled.
"""
