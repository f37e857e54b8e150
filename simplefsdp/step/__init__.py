"""A whole training step as one program: forward, loss, backward, clipping, and the update.

::

    step = compile_step(loss_of, optimizer, max_norm=1.0)
    loss, grad_norm = step(tokens, targets)

If forward and backward are compiled separately, each begins and ends with communication that
nothing hides. In one program the first gathers of the backward hide behind the forward, and
clipping and update are compiled with the rest.

Read ``compile_step`` first. ``update`` captures the optimizer's step as a graph, and finds its
tensors at each call. ``hyperparameters`` says for which optimizer that graph is valid. ``scalars``
computes step counts and learning rates outside of the graph. ``whole_graph`` appends the graph of
the update to the graph of the loss. ``compiler`` compiles the result like any graph, except that
``_torch/one_graph.py`` chooses what the backward recomputes.
"""
