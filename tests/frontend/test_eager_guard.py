"""Eager ranks that take different branches: told by name, and within the rank guard's time."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp import rank_guard, simple_fsdp
from simplefsdp.frontend import eager_guard
from simplefsdp.rank_guard import RankMismatchError, agree, waiting_s

AOT = {"executor": "aot_eager"}


class Branching(nn.Module):
    """Two layers alike; which of them it uses is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.order = [0, 1]

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return x


def gather_in_another_order():
    """What would mix up the parameters of two layers, of which no collective complains."""
    rank_guard._agreed.clear()  # of whatever test came before
    model = simple_fsdp(Branching(), init_device_mesh("cpu", (2,)))
    x = torch.ones(2, 4)
    model.order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    with pytest.raises(RankMismatchError) as caught:
        model(x)
    model.order = [1, 0]
    model(x)  # all together again
    return str(caught.value)


def leave_a_known_branch():
    """Rank 1 does what is new to it, rank 0 what all have done before."""
    model = simple_fsdp(Branching(), init_device_mesh("cpu", (2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_guard, "agree", lambda *args: agree(*args, timeout_s=1))
        model(torch.ones(2, 4))
        model.order = [0, 1] if dist.get_rank() == 0 else [1, 1]
        try:
            model(torch.ones(2, 4))
        except RankMismatchError as error:
            return str(error)
    return ""


def test_another_branch_is_told_by_name(pools):
    for text in pools(2).run(gather_in_another_order):
        assert "what a forward gathers eagerly is not the same on all ranks" in text
        assert "rank 0 has 'layers.0.weight', rank 1 has 'layers.1.weight'" in text


def test_a_rank_that_leaves_what_all_did_before_is_the_one_to_tell(own_ranks):
    known, new = own_ranks.run(leave_a_known_branch)
    own_ranks.stop()  # out of step: they have not asked each other equally often
    assert known == ""
    assert "after 1 s, rank 0 did not get to what rank 1 is about to do" in new


def gather_more_than_the_others():
    """Rank 1 waits in a gather that rank 0 does without."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = simple_fsdp(Branching(), DeviceMesh.from_group(group, "cpu"))
    model.order = [0] if dist.get_rank() == 0 else [0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_guard, "agree", lambda *args: agree(*args, timeout_s=1))
        try:
            model(torch.ones(2, 4))
        except RuntimeError as error:
            return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return "", "", []


def test_a_rank_that_waits_in_vain_is_named_and_says_where_it_is(own_ranks):
    (kind, text, _), (_, _, notes) = own_ranks.run(gather_more_than_the_others)
    own_ranks.stop()  # out of step again
    assert kind == "RankMismatchError"
    assert "after 1 s, rank 1 did not get to what rank 0 is about to do" in text
    assert any("layers.1.weight was being gathered" in note for note in notes)


def wait_as_the_environment_says():
    """Rank 0 comes to the end of a forward that rank 1 does not begin."""
    model = simple_fsdp(Branching(), init_device_mesh("cpu", (2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        if dist.get_rank() == 0:
            mesh = next(model.parameters()).device_mesh
            with pytest.raises(RankMismatchError) as caught, eager_guard.eager_forward():
                eager_guard.note_gather(mesh, "layers.0.weight", "")
            return str(caught.value)
    return ""


def test_what_a_late_rank_is_told_to_raise_is_what_was_waited_for(own_ranks):
    text, _ = own_ranks.run(wait_as_the_environment_says)
    own_ranks.stop()  # out of step again
    assert "after 1 s, rank 1 did not get to what rank 0 is about to do" in text
    assert "of what is not compiled SIMPLEFSDP_TIMEOUT_S, on all of them" in text


@pytest.mark.parametrize("written", ["soon", "0", "-1", "nan"])
def test_what_is_no_time_is_refused(written, monkeypatch):
    monkeypatch.setenv("SIMPLEFSDP_TIMEOUT_S", written)
    with pytest.raises(ValueError, match=f"expected seconds, more than 0, got '{written}'"):
        waiting_s()


def test_what_runs_uncompiled_is_asked_once_a_forward_or_at_each_gather(monkeypatch, solo_mesh):
    asked = []

    def agree(what, lines, ranks, **_):
        asked.append(lines)

    monkeypatch.setattr(eager_guard, "agree", agree)
    monkeypatch.setattr(eager_guard, "given_up_on", lambda: "forward")
    group = solo_mesh.get_group().group_name
    with eager_guard.eager_forward():
        for fqn in "ab":
            eager_guard.note_gather(solo_mesh, fqn, group)
    assert asked == [["forward: a uncompiled"], ["eager", "a", "b"]]
    asked.clear()
    for fqn in "cd":  # of a forward that is compiled
        eager_guard.note_gather(solo_mesh, fqn, group)
    assert asked == [["forward: c uncompiled"], ["forward: d uncompiled"]]


def test_what_was_gathered_before_is_not_asked_again(monkeypatch, solo_mesh):
    asked = []
    monkeypatch.setattr(eager_guard, "agree", lambda what, lines, ranks: asked.append(lines))
    model = simple_fsdp(Branching(), solo_mesh)
    model(torch.ones(2, 4))
    assert asked == [["eager", "layers.0.weight", "layers.1.weight"]]
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    asked.clear()
    model(torch.ones(2, 4))  # what a forward that failed has gathered is forgotten
    assert asked == [["eager", "layers.0.weight", "layers.1.weight"]]


def change_over_to_a_known_branch(compiled):
    """Both ranks have taken both branches; then each takes another one, over and over."""
    torch._dynamo.reset()
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = simple_fsdp(Branching(), DeviceMesh.from_group(group, "cpu"))
    run = model
    if compiled == "whole":
        run = torch.compile(model, backend="simplefsdp", options=AOT)
    elif compiled == "layers":  # of which one has the other's code, and so its names
        for layer in model.layers:
            layer.compile(backend="simplefsdp", options=AOT)
    x = torch.ones(2, 4)
    for model.order in ([0, 1], [1, 0]):
        run(x)
    for _ in range(80):
        model.order = [0, 1] if dist.get_rank() == 0 else [1, 0]
        try:
            run(x)
        except RankMismatchError as error:
            return str(error)
        except RuntimeError:  # rank 0 waits for the other, which has ended
            return "alone"
    return ""


@pytest.mark.parametrize("compiled", ["nothing", "whole", "layers"])
def test_a_branch_that_others_do_not_take_now_is_told_soon(own_ranks, compiled):
    first, second = own_ranks.run(change_over_to_a_known_branch, compiled)
    own_ranks.stop()  # one has ended
    assert first == "alone"
    assert "may have been mixed up" in second
    theirs, own = second.split("rank 1 has sent")
    assert "layers.1.weight" in theirs.rpartition("; then ")[2]
    assert "layers.0.weight" in own.rpartition("; then ")[2]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x):
        return [head(x) for head in self.heads]


def learn_other_tasks(mode):
    """Both ranks run both heads; the loss of each is of one."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = simple_fsdp(Heads(), DeviceMesh.from_group(group, "cpu"), mode=mode)
    try:
        for _ in range(80):
            model(torch.ones(2, 4))[dist.get_rank()].sum().backward()
    except RankMismatchError as error:
        return str(error)
    except RuntimeError:
        return "alone"
    return ""


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_gradients_of_other_heads_are_not_added_up_for_long(own_ranks, mode):
    first, second = own_ranks.run(learn_other_tasks, mode)
    own_ranks.stop()  # one has ended
    assert first == "alone"
    assert "the gradient of heads.1.weight" in second and "times 0" in second


def go_on_alone(compiled):
    """Rank 0 alone evaluates a model that each rank has whole; then all train."""
    torch._dynamo.reset()
    model = simple_fsdp(Branching(), init_device_mesh("cpu", (2,)), mode="replicate")
    run = torch.compile(model, backend="simplefsdp", options=AOT) if compiled else model
    run(torch.ones(2, 4))
    for _ in range(20 if dist.get_rank() == 0 else 0):
        run(torch.ones(2, 4))
    for _ in range(20):
        run(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_sends_nothing_may_be_run_alone(pools, compiled):
    pools(2).run(go_on_alone, compiled)


def fail_behind_the_last_gather():
    """Rank 1's loss is refused, and all skip that batch."""
    model = simple_fsdp(Branching(), init_device_mesh("cpu", (2,)))

    def refuse(module, args, output):
        if model.fails:
            raise ValueError("a label that is none")

    model.register_forward_hook(refuse)
    model.layers[1].register_forward_hook(refuse)
    for step in range(40):
        model.fails = step == 3 and dist.get_rank() == 1
        with suppress(ValueError):
            model(torch.ones(2, 4))


def test_a_forward_that_fails_on_one_rank_has_gathered(pools):
    pools(2).run(fail_behind_the_last_gather)


def replicas_of_their_own(compiled):
    """Two groups of shards evaluate on other numbers of batches, by another forward."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = simple_fsdp(Branching(), mesh, mode="hybrid_shard")
    run = torch.compile(model, backend="simplefsdp", options=AOT) if compiled else model
    x = torch.ones(2, 4)
    for epoch in range(6):
        model.order = [0, 1]
        run(x).sum().backward()
        model.order = [1, 0]
        for _ in range(3 if epoch and dist.get_rank() > 1 else 1):
            with torch.no_grad():
                run(x)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_replicas_may_evaluate_as_they_like(pools, compiled):
    pools(4).run(replicas_of_their_own, compiled)
