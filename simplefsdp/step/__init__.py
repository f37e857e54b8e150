"""A whole training step as one program: forward, loss, backward, clipping, and the update.

::

    step = compile_step(loss_of, optimizer, max_norm=1.0)
    loss, grad_norm = step(tokens, targets)

Compiled apart, a forward and a backward begin and end with communication that nothing hides. As
one program the first gathers of the backward hide behind the forward, and the last reduces behind
the update of what was reduced before.

Read ``compile_step`` first. ``update`` has the optimizer's step as a graph, and finds its tensors
at each call; ``whole_graph`` puts that behind the graph of the loss. The compiler does the rest, as
for any graph (``compiler``), but that ``_torch/one_graph.py`` chooses what backward computes again.
"""
