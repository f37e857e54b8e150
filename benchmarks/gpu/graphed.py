"""Variants whose whole step, forward and backward, is one CUDA graph, as torchtitan captures it.

Beside them the variant that a user of ``options={"cudagraphs": True}`` has: Inductor captures the
forward and the backward apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transfers import link
from variants import BUILDERS, Variant, Workload

CAPTURED = ("fsdp2_compiled", "auto")
_WARM_UP = 3


def name_of(variant: str) -> str:
    """Of a variant whose step is captured."""
    return f"{variant}_graphs"


def captured(load: Workload, *, variant: str) -> Variant:
    """A variant that replays its step.

    What must be static: the batch, which is copied into the tensors of the capture; parameters,
    which the optimizer writes in place; and gradients, which lie where the capture put them.
    Transfers of a replay are not seen by the wire's record; what they take, they take.
    """
    plain = BUILDERS[variant](load)
    tokens, targets = load.tokens.clone(), load.targets.clone()
    _warm_up(plain, tokens, targets)
    graph = torch.cuda.CUDAGraph()
    plain.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = plain.step(tokens, targets)
        loss.backward()
    link.take()  # events of a capture cannot be asked for their time
    loss = loss.detach()
    grads = {name: p.grad for name, p in plain.params.items()}

    def replay(new_tokens: Tensor, new_targets: Tensor) -> Tensor:
        tokens.copy_(new_tokens)
        targets.copy_(new_targets)
        graph.replay()
        for name, param in plain.params.items():
            param.grad = grads[name]
        return loss.clone().requires_grad_()  # the caller's backward() has nothing left to do

    return Variant(name_of(variant), replay, plain.params, plain.model, plain.extra_nbytes)


def _warm_up(plain: Variant, tokens: Tensor, targets: Tensor) -> None:
    """What is made once, compiled or allocated, is made before the capture, on another stream."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            plain.optimizer.zero_grad(set_to_none=True)
            plain.step(tokens, targets).backward()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    link.take()


GRAPHED: dict[str, Callable[[Workload], Variant]] = {
    name_of(variant): functools.partial(captured, variant=variant) for variant in CAPTURED
}
REPLAYED = {*GRAPHED, "auto_cudagraphs"}  # whose transfers the wire does not see
