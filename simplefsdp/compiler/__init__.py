"""The backend of ``torch.compile``: from a Dynamo graph to compiled code, the same on all ranks.

Read ``options`` (what the user may choose) and ``backend`` first. ``backend`` checks a graph and
has the ranks agree on it; an extension may put another graph in its place. ``dedupe`` leaves one
gather per parameter; ``recompute`` and ``reshard`` decide which gathers backward repeats.
``compilation`` runs the passes of ``inductor_passes`` on each graph. ``observed`` plans a graph
(``plans``: one rank plans for all) and logs it (``census``; ``size_limits``, if sizes are open).
Nothing is traced if ``warm_start`` finds the code of an earlier process or of another rank
(``by_one_rank``).

Of layers that are alike (``repeated_layers``) only a few are traced: ``shorten`` puts a
``stand_in`` in the place of the others, and ``lengthen`` replaces the stand-in by copies of a
traced layer, which ``deep_graph`` makes. ``observers`` are told of each graph that is compiled.
"""
