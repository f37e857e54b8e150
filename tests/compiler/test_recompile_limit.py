"""One rank compiles a function more often than the others: right, or told; never left hanging."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from simplefsdp import simple_fsdp
from simplefsdp._torch import given_up_on
from simplefsdp.compiler.backend import RECOMPILES

LIMIT = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, tag):
        return self.linear(2 * x if tag == "none" else x).tanh()


class Tagged(nn.Module):
    """Each tag that it is called with is compiled by itself."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.breaks = breaks

    def forward(self, x, tag):
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x, tag)
        return x


def made(compiled, kind="root", mesh=None):
    """A model of which all is compiled, or its layers alone, or all of it around a graph break."""
    torch.manual_seed(0)
    mode = "replicate" if kind == "replicate" else "fully_shard"
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    model = simple_fsdp(Tagged(kind in ("break", "replicate")), mesh, mode=mode)
    options = {"executor": "aot_eager", "bucketing": "manual"}
    for module in (model.layers if kind == "layers" else [model]) if compiled else ():
        module.compile(backend="simplefsdp", options=options)
    return model


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


def beside_eager(tags):
    """What the ranks compute, compiled and not, and how often a function may be compiled then."""
    losses = losses_of(made(compiled=True), tags)
    return losses, losses_of(made(compiled=False), tags), torch._dynamo.config.recompile_limit


def of_many_kinds_on_one_rank():
    return beside_eager([f"tag {step if dist.get_rank() == 0 else 0}" for step in range(11)])


def of_many_kinds_on_all():
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        return beside_eager([f"tag {step}" for step in range(LIMIT + 2)])


def of_too_many_kinds_on_one_rank(kind, together):
    """Rank 0 meets what it may not compile any more, after both have or not; rank 1 goes on."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    known, new = [f"tag {step}" for step in range(LIMIT + together)], "another tag"
    with torch._dynamo.config.patch(recompile_limit=LIMIT), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        model = made(True, kind, DeviceMesh.from_group(group, "cpu"))
        losses_of(model, known)
        try:
            losses_of(model, [new if dist.get_rank() == 0 else known[0]])
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


def told_alone(how):
    """Rank 0 alone counts flops, or compiles nothing, in a step after the first."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = made(True, mesh=DeviceMesh.from_group(group, "cpu"))
    ways = {
        "flops": lambda: FlopCounterMode(display=False),
        "stance": lambda: torch.compiler.set_stance("force_eager"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        losses_of(model, ["tag"])
        try:
            with ways[how]() if dist.get_rank() == 0 else nullcontext():
                losses_of(model, ["tag"])
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


def told_together():
    """All compute the same, told or not. What is not compiled anyway, one rank may count alone,
    also inside of what is."""
    model, other = made(True), made(True)
    losses = [losses_of(model, ["tag"]) + losses_of(model, ["tag"])]
    told = losses_of(other, ["tag"])
    with FlopCounterMode(display=False) as counted:
        losses.append(told + losses_of(other, ["tag"]))
    alone = FlopCounterMode(display=False) if dist.get_rank() == 0 else nullcontext()
    with pytest.MonkeyPatch.context() as patch, alone:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "20")
        losses_of(made(False), ["tag"])
        inside = torch.compiler.disable(made(False))
        torch.compile(lambda x: inside(2 * x, "tag"), backend="simplefsdp")(torch.ones(2, 4))
    return losses, counted.get_total_flops()


def alone_without_gradients():
    """Ranks that have all there is, or that are sent nothing, may do as they like."""
    found = []
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        model = made(True, "replicate")
        for step in range(LIMIT + 2):
            losses_of(model, [f"tag {step}"])
        with torch.no_grad():
            for step in range(LIMIT + 2) if dist.get_rank() == 0 else ():
                found.append(model(torch.ones(2, 4), f"alone {step}").sum().item())
    return found


def test_a_rank_may_meet_more_kinds_of_calls_than_the_others(pools):
    for losses, eager, limit in pools(2).run(of_many_kinds_on_one_rank):
        assert losses == pytest.approx(eager, rel=1e-6)
        assert limit == RECOMPILES


def test_ranks_that_compile_too_often_together_go_on_eagerly(pools):
    for losses, eager, limit in pools(2).run(of_many_kinds_on_all):
        assert losses == pytest.approx(eager, rel=1e-6)
        assert limit == LIMIT


@pytest.mark.parametrize("together", [0, 1])
@pytest.mark.parametrize(
    ("kind", "function"),
    [("root", "Tagged"), ("break", "Tagged"), ("layers", "Layer"), ("replicate", "Tagged")],
)
def test_a_rank_that_compiles_too_often_alone_is_told(kind, function, together, own_ranks):
    (error, text), (other, _) = own_ranks.run(of_too_many_kinds_on_one_rank, kind, together)
    own_ranks.stop()  # out of step
    assert error == "RankMismatchError", text
    assert "what is gathered uncompiled, beginning with layers.0.linear." in text
    assert "after 1 s, rank 1 did not get to what rank 0 is about to do" in text
    assert f"Dynamo has compiled {function} as often as it may on this rank" in text
    assert other in ("RuntimeError", "")  # a collective's timeout


@pytest.mark.parametrize("how", ["flops", "stance"])
def test_a_rank_that_alone_is_told_not_to_run_compiled_code_is_told(how, own_ranks):
    (error, text), (other, _) = own_ranks.run(told_alone, how)
    own_ranks.stop()  # out of step
    assert error == "RankMismatchError", text
    assert "after 1 s, rank 1 did not get to what rank 0 is about to do. On this rank" in text
    named = {"flops": "FlopCounterMode", "stance": "'force_eager'"}
    assert named[how] in text and "Set it on all ranks or on none" in text
    assert other in ("RuntimeError", "")  # a collective's timeout


def test_ranks_that_are_told_so_together_go_on(pools):
    for (compiled, told), flops in pools(2).run(told_together):
        assert told == pytest.approx(compiled, rel=1e-6)
        assert flops > 0


def test_a_rank_may_compile_too_often_alone_where_nothing_is_sent(pools):
    found, _ = pools(2).run(alone_without_gradients)
    assert len(set(found)) == 1 and len(found) == LIMIT + 2


def test_what_dynamo_has_given_up_on_is_known_until_it_is_reset(fake_mesh):
    seen = []

    def function(x, tag):
        torch._dynamo.graph_break()
        seen.append(given_up_on())
        return x + len(tag)

    compiled = torch.compile(function, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        for step in range(LIMIT + 1):
            compiled(torch.ones(2), "a" * (step + 1))
        assert not any(seen[:LIMIT])
        assert "function" in seen[LIMIT]
        torch.compiler.reset()
        compiled(torch.ones(2), "b")
        assert not seen[-1]
