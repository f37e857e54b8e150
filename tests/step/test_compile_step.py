"""What a compiled step refuses, what it compiles anew for, and what it takes along."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.adapters._torch import is_stored
from inductor_passes.executor import regional
from simplefsdp import compile_step, microbatch, simple_fsdp
from simplefsdp._torch import updates
from simplefsdp.compiler.observers import observing
from simplefsdp.step import update

WIDTH = 8
OPTIONS = {"executor": "aot_eager", "bucketing": "manual"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unread = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, reads: bool = False) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) + (self.unread.sum() if reads else 0)


def loss_with(model: nn.Module):
    return lambda x: (model(x) - x).square().mean()


def pair(mesh, kind=torch.optim.AdamW, **options):
    """A plain model and a wrapped copy, and an optimizer of each."""
    plain = Net()
    model = simple_fsdp(copy.deepcopy(plain), mesh)
    optimizers = [kind(m.parameters(), **{"lr": 1e-2, **options}) for m in (plain, model)]
    return plain, model, *optimizers


def plain_step(plain, optimizer, *batches):
    for x in batches:
        (loss_with(plain)(x) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def check(plain, model, tolerance=1e-6):
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn).full_tensor()
        torch.testing.assert_close(got, param.detach(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def seen():
    """The graphs that are compiled."""
    found = []
    with observing(found.append):
        yield found


@pytest.mark.slow(quick=["SGD-options0"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_updates_of_other_optimizers(solo_mesh, seen, kind, options):
    plain, model, own, others = pair(solo_mesh, kind, **options)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        plain_step(plain, own, x)
        step(x)
    check(plain, model, 1e-5)
    assert others.param_groups[0].get("foreach") is options.get("foreach")
    assert len(seen) == 1


def test_what_dynamo_sets_on_a_gpu_is_taken_back(solo_mesh, monkeypatch):
    """Before 2.15 it sets ``capturable`` for parameters that are on a GPU."""

    def as_on_a_gpu(optimizer, captured=updates.captured_step):
        optimizer.param_groups[0]["capturable"] = True
        return captured(optimizer)

    monkeypatch.setattr(updates, "captured_step", as_on_a_gpu)
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    plain_step(plain, own, x)
    step(x)
    check(plain, model)
    assert others.param_groups[0]["capturable"] is False


@pytest.mark.parametrize("shape", [(4,), ()])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", ["AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adagrad"]
)
def test_counts_are_where_the_optimizer_makes_them(kind, fused, shape):
    """On a GPU, which is not there: its tensors are fake."""
    with FakeTensorMode():
        param = nn.Parameter(torch.ones(shape, device="cuda"))
        param.grad = torch.zeros_like(param)
        options = {"fused": True} if fused and kind in ("AdamW", "Adagrad") else {}
        made = []
        for capturable in (False, True):  # as the optimizer does it, and as Dynamo makes it
            optimizer = getattr(torch.optim, kind)([param], lr=1e-2, **options)
            group = optimizer.param_groups[0]
            if not options and "capturable" in group:
                group["capturable"] = capturable
            if kind != "Adagrad":  # which makes it when it is made
                lists = len(inspect.signature(optimizer._init_group).parameters) - 1
                optimizer._init_group(group, *([] for _ in range(lists)))
            group |= {"capturable": False} if "capturable" in group else {}
            if capturable:
                update._move_counts(optimizer, ())
            state = optimizer.state[param].items()
            made.append({k: v.device.type for k, v in state if isinstance(v, torch.Tensor)})
        assert made[0] == made[1]


def test_learning_rates_change_without_compiling(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for number in range(4):
        x = torch.randn(4, WIDTH)
        for optimizer in (own, others):
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    assert [graph.part for graph in seen] == ["step"]


@pytest.mark.slow
def test_other_hyperparameters_are_compiled_anew(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for decay in (0.5, 0.1, 0.5):
        x = torch.randn(4, WIDTH)
        for optimizer in (own, others):
            optimizer.param_groups[0]["weight_decay"] = decay
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    assert len(seen) == 2  # the first one is still there


@pytest.mark.slow
def test_another_batch_size_is_compiled_anew(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for size in (4, 6, 7):
        x = torch.randn(size, WIDTH)
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    assert len(seen) == 2  # then sizes are open


def test_what_the_loss_does_not_read_stays(solo_mesh):
    plain, model, own, others = pair(solo_mesh, weight_decay=0.5)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    plain_step(plain, own, x)
    step(x)
    check(plain, model)
    assert torch.equal(model.unread.full_tensor(), torch.ones(WIDTH))
    assert float(others.state[model._parameters["unread"]].get("step", torch.zeros(()))) == 0


def test_loaded_state_counts(solo_mesh, seen):
    """Counts that differ from parameter to parameter, too."""
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    plain_step(plain, own, x)
    step(x)
    for optimizer in (own, others):
        saved = copy.deepcopy(optimizer.state_dict())
        for number, state in saved["state"].items():
            state["step"].fill_(10 + number % 2)
            state["exp_avg"] *= 2
        optimizer.load_state_dict(saved)
    for _ in range(2):
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    counts = {float(s["step"]) for s in others.state.values() if float(s["step"]) > 9}
    assert counts == {10, 12, 13}  # that of what the loss does not read stays
    assert len(seen) == 2


@pytest.mark.slow
def test_state_is_made_again_of_parameters_that_come_later(solo_mesh):
    """As in progressive unfreezing; and of all, where it was dropped."""
    plain, model, *_ = pair(solo_mesh)
    optimizers = []
    for net in (plain, model):
        net.first.requires_grad_(False)
        optimizers.append(torch.optim.SGD(net.second.parameters(), lr=1e-2, momentum=0.9))
    own, others = optimizers
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for at in range(6):
        for net, optimizer in ((plain, own), (model, others)):
            if at == 2:
                net.first.requires_grad_(True)
                optimizer.add_param_group({"params": list(net.first.parameters())})
            if at == 4:
                optimizer.state.clear()
        x = torch.randn(4, WIDTH)
        plain_step(plain, own, x)
        step(x)
        check(plain, model)


def test_gradients_of_micro_batches_are_taken_along(solo_mesh):
    plain, model, own, others = pair(solo_mesh)
    third = 1 / 3
    loss = loss_with(model)
    step = compile_step(lambda x: loss(x) * third, others, options=OPTIONS)
    for _ in range(2):
        batches = [torch.randn(4, WIDTH) for _ in range(3)]
        plain_step(plain, own, *batches)
        for x in batches[:-1]:
            with microbatch(model, is_last=False):
                (loss(x) * third).backward()
        step(batches[-1])
    check(plain, model, 1e-5)
    others.step()  # nothing waits


def test_a_deferring_model_is_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    with pytest.raises(ValueError, match="is_last"), microbatch(model, is_last=False):
        step(torch.randn(4, WIDTH))


def test_full_parameters_that_are_kept_are_refreshed(solo_mesh):
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    model.unshard()
    for _ in range(3):
        plain_step(plain, own, x)
        step(x)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_there_are_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    loss_with(model)(torch.randn(4, WIDTH)).backward()
    with pytest.raises(ValueError, match=r"has a gradient.*zero_grad"):
        step(torch.randn(4, WIDTH))


def test_hooks_are_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    handle = others.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"hook .* each step"):
        step(torch.randn(4, WIDTH))
    handle.remove()
    handle = model.first._parameters["weight"].register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match="has hooks"):
        step(torch.randn(4, WIDTH))


def test_an_optimizer_that_cannot_be_followed_is_refused(solo_mesh):
    model = simple_fsdp(Net(), solo_mesh)
    step = compile_step(loss_with(model), torch.optim.LBFGS(model.parameters()), options=OPTIONS)
    with pytest.raises(ValueError, match=r"LBFGS.step\(\) cannot be compiled"):
        step(torch.randn(4, WIDTH))


@pytest.mark.slow
def test_a_gradient_that_does_not_arrive_is_told_by_name(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    loss = loss_with(model)
    step = compile_step(
        lambda x: loss(x) + unread(model) * 0 + detached(model, x),
        others,
        options=OPTIONS,
    )
    step(torch.randn(4, WIDTH))  # it is read elsewhere, with a gradient
    step = compile_step(lambda x: detached(model, x), others, options=OPTIONS)
    with pytest.raises(ValueError, match=r"no gradient reaches second\.\w+ \(2 such parameters\)"):
        step(torch.randn(4, WIDTH))


def unread(model):
    return model.second.weight.detach().sum().full_tensor()


def detached(model, x):
    return model.first(x).square().mean() + model.second(x).detach().mean()


def test_a_loss_of_nothing_that_is_trained_is_refused(solo_mesh):
    _, model, _, _ = pair(solo_mesh)
    others = torch.optim.SGD([model._parameters["unread"]], lr=1.0)
    with pytest.raises(ValueError, match="reads no parameter that the optimizer trains"):
        compile_step(loss_with(model), others, options=OPTIONS)(torch.randn(4, WIDTH))


def test_a_loss_that_is_no_number_is_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    with pytest.raises(ValueError, match=r"loss: expected one number.*\(4, 8\)"):
        compile_step(model, others, options=OPTIONS)(torch.randn(4, WIDTH))


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_max_norm_is_checked(solo_mesh, norm):
    _, model, _, others = pair(solo_mesh)
    with pytest.raises(ValueError, match="max_norm: expected a number >= 0"):
        compile_step(loss_with(model), others, max_norm=norm)


def test_a_plain_model_is_refused(solo_mesh):
    plain, _, own, _ = pair(solo_mesh)
    with pytest.raises(ValueError, match="is not sharded: call"):
        compile_step(loss_with(plain), own, options=OPTIONS)(torch.randn(4, WIDTH))


@pytest.mark.slow
def test_backward_gathers_and_computes_again_what_is_not_kept(fake_mesh, seen):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(Net(), fake_mesh(4), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    step = compile_step(loss_with(model), optimizer, max_norm=1.0, options=OPTIONS)
    step(torch.randn(4, WIDTH))
    (graph,) = seen
    sent = [op.collective for _, op in graph.rehearsal.reading.program.starts()]
    gathered = [c.fqns[0] for c in sent if c.kind == "gather"]
    # Of the first layer nothing is needed for the gradients of its parameters.
    assert sorted(set(gathered)) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert [fqn for fqn in set(gathered) if gathered.count(fqn) > 1] == ["second.weight"]
    assert [c.kind for c in sent if not c.fqns] == ["other"]  # the norm
    program = graph.rehearsal.after
    merged = [op.collective.fqns for _, op in program.starts() if op.sends == "gather"]
    assert len(merged) == len({*merged}) == 3  # what is gathered again has a bucket of its own


@pytest.mark.slow(quick=["None"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_by_regions_an_update_is_one(fake_mesh, monkeypatch, max_norm):
    cut, pieces = regional.cut, []
    monkeypatch.setattr(regional, "cut", lambda graph: pieces.append(cut(graph)) or pieces[-1])
    model = simple_fsdp(Net(), fake_mesh(4))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {**OPTIONS, "executor": "regions"}
    compile_step(loss_with(model), optimizer, max_norm=max_norm, options=options)(torch.ones(4, 8))
    (ran,) = pieces
    written = [
        sum(
            node.target is torch.ops.aten.copy_.default for node in getattr(piece, "nodes", [piece])
        )
        for piece in ran
    ]
    assert [n for n in written if n] == [3, 3, 3, 3]  # a parameter and its two moments


@pytest.mark.slow
def test_by_regions_updates_are_those_of_the_plain_model(solo_mesh):
    """Of one rank, where views of what is written to are read: writes stand by themselves."""
    plain, model, own, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options={**OPTIONS, "executor": "regions"})
    for x in torch.randn(3, 4, WIDTH):
        plain_step(plain, own, x)
        step(x)
    check(plain, model)


@pytest.mark.slow
def test_rows_of_a_gathered_table_are_stored(fake_mesh, seen):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.linear = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, places: torch.Tensor) -> torch.Tensor:
            rows = self.embed(places)
            return (rows.tanh() + self.linear(rows)).square().mean()

    model = simple_fsdp(Rows(), fake_mesh(4))
    step = compile_step(model, torch.optim.AdamW(model.parameters()), options=OPTIONS)
    step(torch.zeros(3, dtype=torch.long))
    nodes = [node for (node, *_) in seen[0].rehearsal.reading.nodes.values()]
    assert [node.name for node in nodes if is_stored(node)] == ["embedding"]


@pytest.mark.slow
def test_state_of_the_optimizer_is_not_counted_as_memory_of_the_step(fake_mesh, seen):
    model = simple_fsdp(Net(), fake_mesh(4))
    optimizer = torch.optim.AdamW(model.parameters())
    compile_step(loss_with(model), optimizer, options=OPTIONS)(torch.randn(4, WIDTH))
    program = seen[0].rehearsal.reading.program
    moments = [
        state.to_local()
        for s in optimizer.state.values()
        for key, state in s.items()
        if key != "step"
    ]
    read = [m for m in moments[: len(moments)] if m.numel()]
    assert len(read) == 10
    written = {n for op in program.ops for n in op.writes} & set(program.inputs)
    assert written and written <= program.resident


class Own(torch.optim.Optimizer):
    """Plain descent, as somebody writes it; ``note`` is called in each step."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "count": 0, "counts": {"all": [0]}})
        self.count, self.counts, self.total = 0, {"all": [0]}, torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            scale = self.note(group)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] * scale)

    def note(self, group):
        return 1.0


class InGroup(Own):
    def note(self, group):
        group["count"] += 1
        return group["count"]


class InState(Own):
    def note(self, group):
        state = self.state[group["params"][0]]
        state["count"] = state.get("count", 0) + 1
        return state["count"]


class InDictOfGroup(Own):
    def note(self, group):
        group["counts"]["all"][0] += 1
        return group["counts"]["all"][0]


class InDict(Own):
    def note(self, group):
        self.counts["all"][0] += 1
        self.counts["more"] = 1
        return self.counts["all"][0]


class InGlobalState(Own):
    def note(self, group):
        self.state["count"] = self.state.get("count", 0) + 1
        return self.state["count"]


class Sign(enum.Enum):
    UP = 1.0
    DOWN = 2.0


@dataclasses.dataclass
class Config:
    scale: float = 0.5


class ByDict(Own):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.counts["itself"] = self.counts
        self.sign, self.config = Sign.UP, Config()

    def note(self, group):
        scale = self.sign.value * self.config.scale
        return scale * (group["counts"]["all"][0] + self.counts["all"][0])


class InAttribute(Own):
    def note(self, group):
        self.count += 1
        return self.count


class InForeach(Own):
    def note(self, group):
        state = self.state[group["params"][0]]
        if "count" not in state:
            state["count"] = torch.zeros(())
        torch._foreach_add_([state["count"]], 1)
        return state["count"]


class Wrapped(Own):
    @functools.wraps(Own.step)
    def step(self, closure=None):
        Own.step(self)
        Own.step(self)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (InGroup, "param_groups.0..'count'. is a number of Python's"),
        (InState, "state.'count'. is a number of Python's"),
        (InDictOfGroup, "param_groups.0..'counts'. is a number of Python's"),
        (InDict, "optimizer.counts is a number of Python's"),
        (InGlobalState, "state.'count'. is of no parameter"),
        (InAttribute, r"assigns to an attribute at each step, \.count"),
        (Wrapped, "its step is wrapped by .*test_compile_step.py"),
    ],
)
def test_what_a_graph_would_have_for_ever_is_refused(solo_mesh, kind, said):
    """And the optimizer is as it was."""
    _, model, _, others = pair(solo_mesh, kind)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    with pytest.raises(ValueError, match=said):
        step(torch.randn(4, WIDTH))
    assert others.param_groups[0]["count"] == others.count == 0
    assert others.param_groups[0]["counts"] == others.counts == {"all": [0]}
    assert not any(others.state.values())


def test_numbers_that_are_written_to_together_are_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh, InForeach)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    step(torch.randn(4, WIDTH))  # not compiled, as it makes its state
    with pytest.raises(ValueError, match="writes to 'count', a tensor of one number"):
        step(torch.randn(4, WIDTH))


def test_an_optimizer_of_somebodys(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh, Own)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    assert len(seen) == 1


def test_numbers_in_options_may_change(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh, ByDict)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for i in range(5):
        for optimizer in (own, others):
            optimizer.param_groups[0]["counts"]["all"][0] = min(i, 1)
            optimizer.counts = {"all": [max(i, 1)]}
            optimizer.sign = Sign.UP if i < 3 else Sign.DOWN
            optimizer.config.scale = 0.5 if i < 4 else 0.25
        x = torch.randn(4, WIDTH)
        plain_step(plain, own, x)
        step(x)
    check(plain, model)
    assert len(seen) == 5


def test_a_replaced_step_is_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    others.step = lambda: None
    with pytest.raises(ValueError, match="its step was replaced"):
        compile_step(loss_with(model), others, options=OPTIONS)(torch.randn(4, WIDTH))


def test_a_gradient_that_nobody_uses_is_refused(solo_mesh):
    _, model, _, _ = pair(solo_mesh)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1])
    step = compile_step(loss_with(model), others, options=OPTIONS)
    with pytest.raises(ValueError, match=r"first\.bias: the loss reads it, .* does not train it"):
        step(torch.randn(4, WIDTH))


@pytest.mark.slow
def test_state_in_another_dtype_is_compiled_anew(solo_mesh, seen):
    plain, model, own, others = pair(solo_mesh, torch.optim.SGD, momentum=0.9)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    for number in range(4):  # the first one is not compiled
        x = torch.randn(4, WIDTH)
        plain_step(plain, own, x)
        step(x)
        if number == 1:
            for optimizer in (own, others):
                for state in optimizer.state.values():
                    if state["momentum_buffer"] is not None:
                        state["momentum_buffer"] = state["momentum_buffer"].to(torch.float64)
    check(plain, model, 1e-5)
    assert len(seen) == 2


def test_a_rate_that_groups_share_is_each_ones_own(solo_mesh):
    plain, model = Net(), None
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    optimizers = []
    for net in (plain, model):
        groups = [{"params": [*net.first.parameters()]}, {"params": [*net.second.parameters()]}]
        optimizers.append(torch.optim.SGD(groups, lr=torch.tensor(0.1)))
    step = compile_step(loss_with(model), optimizers[1], options=OPTIONS)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        plain_step(plain, optimizers[0], x)
        step(x)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01
    check(plain, model)


@pytest.mark.slow
def test_hyperparameters_that_never_stay_are_told_by_name(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    for number in range(8):
        others.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
        step(x)
    others.param_groups[0]["betas"] = (0.5, 0.99)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['betas'\] has changed for the 8th"):
        step(x)


def test_what_waits_for_a_parameter_that_is_not_read_is_not_dropped(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    with microbatch(model, is_last=False):
        model(x, reads=True).mean().backward()
    with pytest.raises(ValueError, match=r"a compiled step: gradients .* wait to be reduced"):
        step(x)


def test_nothing_is_kept_of_a_step_that_nobody_has(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    step(torch.randn(4, WIDTH))
    gone = weakref.ref(step.__self__)
    moments = weakref.ref(next(iter(others.state.values()))["exp_avg"])
    others.load_state_dict(copy.deepcopy(others.state_dict()))
    del step
    gc.collect()
    assert gone() is None and moments() is None


def test_nothing_is_kept_of_a_model_and_its_first_batch(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    x = torch.randn(4, WIDTH)
    first = weakref.ref(x)
    step(x)
    del x
    step(torch.randn(4, WIDTH))
    gc.collect()
    assert first() is None
    held = [weakref.ref(param) for param in model.parameters()]
    held += [weakref.ref(state["exp_avg"]) for state in others.state.values()]
    del step, model, others, _
    gc.collect()
    assert [ref() is None for ref in held] == [True] * len(held)


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda model, x: (model(x).sum(), 1), "loss: expected a tensor, got tuple"),
        (lambda model, x: model(x).sum().detach(), "depends on no parameter that wants a gradient"),
        (lambda model, x: {"loss": model(x).sum()}, "loss: expected a tensor, got dict"),
        (lambda model, x: model(x).sum().item(), "loss: expected a tensor, got float"),
        (lambda model, x: None, "loss: expected a tensor, got NoneType"),
    ],
)
def test_losses_of_another_kind_are_refused(solo_mesh, loss, error):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(lambda x: loss(model, x), others, options=OPTIONS)
    with pytest.raises((TypeError, ValueError), match=error):
        step(torch.randn(4, WIDTH))


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda x: x * 1.5, "computed outside and wants.* compute it in the loss, detach"),
        (
            lambda x: x.detach().requires_grad_(),
            "it wants a gradient, and the optimizer does not train it",
        ),
    ],
)
def test_gradients_of_inputs_are_refused(solo_mesh, made, error):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    outside = nn.Parameter(torch.randn(4, WIDTH))
    with pytest.raises(ValueError, match=error):
        step(made(outside))


def test_replaced_parameters_are_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step, x = compile_step(loss_with(model), others, options=OPTIONS), torch.randn(4, WIDTH)
    step(x)
    state = {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"AdamW: holds .* as it was before .*assign=True"):
        step(x)


def test_a_cast_of_what_a_step_trains_is_told_to_copy(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    x = torch.randn(4, WIDTH)
    compile_step(loss_with(model), others, options=OPTIONS)(x)
    with pytest.raises(RuntimeError, match="swap") as raised:
        model.double()
    (note,) = raised.value.__notes__
    assert "copy.deepcopy(model)" in note
    assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    assert model(x).dtype == torch.float32


def test_what_is_no_optimizer_is_refused(solo_mesh):
    _, model, _, _ = pair(solo_mesh)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got Net"):
        compile_step(loss_with(model), model)


def test_inference_mode_is_refused(solo_mesh):
    _, model, _, others = pair(solo_mesh)
    step = compile_step(loss_with(model), others, options=OPTIONS)
    with pytest.raises(ValueError, match="inference mode"), torch.inference_mode():
        step(torch.randn(4, WIDTH))
