"""A whole training step as one program: forward, loss, backward, clipping, and the update.

::

    step = compile_step(loss_of, optimizer, max_norm=1.0)
    loss, grad_norm = step(tokens, targets)

Compiled apart, a forward and a backward begin and end with communication that nothing hides. As
one program the first gathers of the backward hide behind the forward; and clipping and update are
compiled with the rest.

Read ``compile_step`` first. ``update`` has the optimizer's step as a graph, and finds its tensors
at each call; ``hyperparameters`` says for which optimizer that graph holds; ``scalars`` computes
step counts and learning rates outside of it. ``whole_graph`` puts it behind the graph of the loss.
The compiler does the rest, as for any graph (``compiler``), but that ``_torch/one_graph.py``
chooses what backward computes again.
"""
