"""One rank compiles a function more often than the others: right, or told; never left hanging."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import simple_fsdp
from simplefsdp.compiler.backend import RECOMPILES
from simplefsdp.rank_guard import RankMismatchError

LIMIT = 2


class Tagged(nn.Module):
    """Each tag that it is called with is compiled by itself."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.breaks = breaks

    def forward(self, x, tag):
        if self.breaks:
            torch._dynamo.graph_break()
        if tag == "none":
            x = 2 * x
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def losses_of(model, tags):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, tag in enumerate(tags):
        x = torch.full((2, 4), 1.0 + step + dist.get_rank())
        loss = model(x, tag).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(compiled, breaks=False):
    torch.manual_seed(0)
    model = simple_fsdp(Tagged(breaks), init_device_mesh("cpu", (2,)))
    if compiled:
        options = {"executor": "aot_eager", "bucketing": "manual", "rank_guard_timeout_s": 1}
        model.compile(backend="simplefsdp", options=options)
    return model


def beside_eager(tags):
    """What the ranks compute, compiled and not, and how often a function may be compiled then."""
    losses = losses_of(made(compiled=True), tags)
    return losses, losses_of(made(compiled=False), tags), torch._dynamo.config.recompile_limit


def of_many_kinds_on_one_rank():
    return beside_eager([f"tag {step if dist.get_rank() == 0 else 0}" for step in range(11)])


def of_many_kinds_on_all():
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        return beside_eager([f"tag {step}" for step in range(LIMIT + 2)])


def of_too_many_kinds_on_one_rank(breaks):
    """Rank 1 does not begin the step of which rank 0 runs something eagerly."""
    tags = [f"tag {step if dist.get_rank() == 0 else 0}" for step in range(LIMIT + 1)]
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        model = made(True, breaks)
        losses_of(model, tags[:LIMIT])
        if dist.get_rank() == 0:
            with pytest.raises(RankMismatchError) as caught:
                model(torch.ones(2, 4), tags[LIMIT])
            return str(caught.value)
    return ""


def test_a_rank_may_meet_more_kinds_of_calls_than_the_others(pools):
    for losses, eager, limit in pools(2).run(of_many_kinds_on_one_rank):
        assert losses == pytest.approx(eager, rel=1e-6)
        assert limit == RECOMPILES


def test_ranks_that_compile_too_often_together_go_on_eagerly(pools):
    for losses, eager, limit in pools(2).run(of_many_kinds_on_all):
        assert losses == pytest.approx(eager, rel=1e-6)
        assert limit == LIMIT


@pytest.mark.parametrize(
    ("breaks", "what"),
    [(False, "the forward of Tagged"), (True, "the gather of layers.0.weight")],
)
def test_a_rank_that_compiles_too_often_alone_is_told(breaks, what, own_ranks):
    text, _ = own_ranks.run(of_too_many_kinds_on_one_rank, breaks)
    own_ranks.stop()  # out of step
    assert text.startswith(f"{what} (eager, inside of a compiled call): after 1 s, rank 1 did not")
    assert f"torch._dynamo.config.recompile_limit, {LIMIT} here" in text
