"""FSDP2's methods on wrapped modules: each has its effect, counted in collectives where it has one.

Those that defer reduces are in ``test_accumulation.py``.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import DIM, Mlp, check_close, check_grads, mean, mine, rows, wrapped
from graphs import capture, gathers, reduces
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend.accumulation import Sync, sync_of
from simplefsdp.frontend.after_wrap import _replaced
from simplefsdp.frontend.kept import _kept_of_memory, kept_of
from simplefsdp.frontend.wrapped import KEPT
from simplefsdp.rank_guard import RankMismatchError


def run_of(model: nn.Module, executor: str):
    torch._dynamo.reset()
    if executor == "eager":
        return model
    options = {"executor": executor, "bucketing": "none"}
    return torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)


def counted(call) -> int:
    """Gathers that ``call`` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call()
    return sum(
        event.name.startswith("_c10d_functional::all_gather_into_tensor")
        for event in profiled.events()
    )


def kept(executor, how):
    """Gathers per step, of a model that is unsharded, trained, and sharded again."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    run = run_of(model, executor)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, **how) for m in (plain, model)]

    def step(number: int) -> None:
        mean(run(*mine(rows(number)))).backward()
        mean(plain(*rows(number))).backward()

    found = []
    for number in range(5):
        if number == 1:
            assert model.unshard() is None
        if number == 4:
            model.reshard()
        found.append(bool(counted(lambda n=number: step(n))))
        check_grads(plain, model, tolerance=1e-4)
        if number in (0, 2, 4):  # so steps 1 and 3 read what has changed
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    # In step 3 the shards have changed, and in the last one nothing is kept.
    assert found == [True, False, False, True, True]


@pytest.mark.slow(quick=["eager-how0"])
@pytest.mark.parametrize(
    ("executor", "how"),
    [("eager", {}), ("aot_eager", {"fused": True}), ("aot_eager", {"foreach": True})],
)
def test_unshard_gathers_once_until_the_shards_change(pools, executor, how):
    pools(2).run(kept, executor, how)


def local_of(param: nn.Parameter, how: str) -> torch.Tensor:
    local = param.to_local() if isinstance(param, DTensor) else param
    return nn.Parameter(local.data) if how == "data" else local.detach()


def stepped_by_local_tensors(executor: str, how: str) -> None:
    """By an optimizer that knows no DTensors, or by hand, as by a kernel that is given pointers."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    both = [list(m.parameters()) for m in (plain, model)]
    locals_of = [[local_of(param, how) for param in params] for params in both]
    optimizers = [torch.optim.AdamW(own, lr=0.1, fused=how == "fused") for own in locals_of]
    run = run_of(model, executor)
    for number in range(4):
        if number == 0 or how == "by hand":
            model.unshard()  # FSDP2's lasts until backward ends, so its users call it in each step
        mean(run(*mine(rows(number)))).backward()
        mean(plain(*rows(number))).backward()
        check_grads(plain, model, tolerance=1e-4)
        for params, own, optimizer in zip(both, locals_of, optimizers, strict=True):
            for param, local in zip(params, own, strict=True):
                grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                local.grad, param.grad = grad.detach(), None
                if how == "by hand":
                    local.numpy().__isub__(0.1 * grad.detach().numpy())
            if how != "by hand":
                optimizer.step()


@pytest.mark.slow(quick=["eager-fused", "aot_eager-by hand"])
@pytest.mark.parametrize("how", ["fused", "data", "by hand"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_unshard_with_writes_that_torch_does_not_count(pools, executor, how):
    pools(2).run(stepped_by_local_tensors, executor, how)


def unsharded_between_forwards(executor: str) -> None:
    """Two forwards, each after an ``unshard``, before a backward: as of two answers to a prompt."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    run = run_of(model, executor)
    losses = []
    for number in range(2):
        model.unshard()
        losses.append(mean(run(*mine(rows(number)))))
    model.unshard()
    sum(losses).backward()
    sum(mean(plain(*rows(number))) for number in range(2)).backward()
    check_grads(plain, model, tolerance=1e-4)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_unshard_before_each_of_two_forwards(pools, executor):
    pools(2).run(unsharded_between_forwards, executor)


def kept_from_backward():
    model = wrapped(nn.Sequential(Mlp(), Mlp()), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model.set_reshard_after_backward(False)
    assert model[0].__dict__["_simple_fsdp_kept"]["row"].dtype == torch.bfloat16
    assert not counted(lambda: mean(model(*mine(rows(0)))).backward())
    model.set_reshard_after_backward(True)
    assert counted(lambda: mean(model(*mine(rows(0)))).backward())


def test_reshard_after_backward(pools):
    pools(2).run(kept_from_backward)


def written_by_one_rank():
    model = wrapped(nn.Sequential(Mlp(), Mlp()))
    options = {"executor": "aot_eager", "bucketing": "none", "rank_guard_timeout_s": 2}
    run = torch.compile(model, backend="simplefsdp", options=options)
    model.unshard()
    run(*mine(rows(0)))
    if dist.get_rank() == 1:
        run(*mine(rows(0)))  # what it keeps is what it has: it waits for nobody
        return
    with torch.no_grad():
        model[0].row.mul_(2)
    with pytest.raises(RankMismatchError, match="what to gather again: after 2 s, rank 1 "):
        run(*mine(rows(0)))


@pytest.mark.slow
def test_what_one_rank_alone_would_gather_is_told(pools):
    pools(2).run(written_by_one_rank)
    pools(2).stop()  # one rank has asked the others once more than they it


def generates_without_gathers():
    model = wrapped(nn.Sequential(Mlp(), Mlp()))
    (x,) = rows(0)
    with torch.no_grad():
        wanted = model(x)
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        got = []
        assert not counted(lambda: got.append(model(x)))
        with torch.inference_mode():
            assert not counted(lambda: got.append(model(x)))
        assert all(torch.equal(wanted, each) for each in got)
        other = copy.deepcopy(model)
        other[0].row.mul_(2)
        model.reshard()
        assert counted(lambda: model(x))
        assert torch.equal(model(x), wanted)
        assert not torch.equal(other(x), wanted)


def test_inference_with_kept_parameters(pools):
    pools(2).run(generates_without_gathers)


def assigned(model):
    model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()}, assign=True)


def loaded(model):
    model.load_state_dict({k: torch.zeros(v.shape) for k, v in model.state_dict().items()})


def emptied(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


def read_from_disk(model):
    with tempfile.TemporaryDirectory() as folder:
        zeros = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
        dcp.save(zeros, checkpoint_id=folder)
        dcp.load(model.state_dict(), checkpoint_id=folder)


def written_whole(model):
    with unsharded(model):
        for param in model.parameters():
            param.data.zero_()


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("change", [assigned, loaded, emptied, read_from_disk, written_whole])
def test_nothing_old_is_kept(solo_mesh, executor, change):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run, x = run_of(model, executor), torch.ones(2, DIM)
    model.unshard()
    assert run(x).any()
    change(model)
    assert not run(x).any()


def test_one_of_two_that_are_tied_is_resharded(solo_mesh):
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    simple_fsdp(model, solo_mesh)
    model.unshard()
    model["other"].reshard()
    with torch.no_grad():
        model["one"].weight.zero_()
        model["one"].bias.zero_()
    assert not model["one"](torch.ones(1, 4)).any()


def test_what_was_wrapped_by_itself_is_unsharded_by_itself(solo_mesh):
    """As FSDP2's: on a model whose layers were wrapped first, it is no memory for all of them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    simple_fsdp(model[0], solo_mesh)
    simple_fsdp(model, solo_mesh)

    def are_kept():
        return [kept_of(m, "weight") is not None for m in (model[0], model[1][0], model[2])]

    model.unshard()
    assert are_kept() == [False, True, True]
    model[0].unshard()
    model.reshard()
    assert are_kept() == [True, False, False]
    model.set_reshard_after_backward(True)
    assert are_kept() == [False, False, False]


def in_their_place(model, weights, x):
    return torch.func.functional_call(model, weights, (x,))


def swapped(model, weights, x):
    for fqn, param in model.named_parameters():
        torch.utils.swap_tensors(param, weights[fqn])
    return model(x)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", [in_their_place, swapped])
@pytest.mark.parametrize("others_are_kept", [False, True])
def test_what_is_kept_is_not_read_in_the_place_of_others(
    solo_mesh, executor, call, others_are_kept
):
    """Weights of a teacher, say, or of an average."""
    model, x = simple_fsdp(nn.Linear(4, 3), solo_mesh), torch.ones(2, 4)
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for param in teacher.parameters():
            param.fill_(1)
        if others_are_kept:
            teacher.unshard()
        wanted, weights = teacher(x), dict(teacher.named_parameters())
        model.unshard()
        model(x)
        if executor == "aot_eager":
            torch._dynamo.reset()
            model.compile(backend="simplefsdp", options={"executor": executor})
            model(x)
            with pytest.raises(ValueError, match=r"unshard\(\) keeps.*call reshard\(\)"):
                call(model, weights, x)
            model.reshard()
        is_swapped = executor == "aot_eager" and call is swapped
        assert torch.equal(model(x) if is_swapped else call(model, weights, x), wanted)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_a_checkpoint_is_loaded_into_tensors_that_were_given_before(solo_mesh, tmp_path, executor):
    model, x = simple_fsdp(nn.Linear(4, 3), solo_mesh), torch.ones(2, 4)
    run = run_of(model, executor)
    with torch.no_grad():
        before = run(x)
        dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "step", no_dist=True)
        for param in model.parameters():
            param.zero_()
        model.unshard()
        state = dict(model.state_dict())
        for _ in range(2):  # the second time nothing of that state is new
            assert not run(x).any()
        dcp.load(state, checkpoint_id=tmp_path / "step", no_dist=True)
        assert torch.equal(run(x), before)


def state_dict_between_forwards(executor: str) -> None:
    """Of one backward; then weights are written to by hand."""
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    model = wrapped(plain)
    run = run_of(model, executor)
    model.unshard()
    for step in range(2):
        (x,), (y,) = rows(step), rows(step + 1)
        loss = mean(run(mine(x)))
        model.state_dict()
        (loss + mean(run(mine(y)))).backward()
        (mean(plain(x)) + mean(plain(y))).backward()
        check_grads(plain, model, tolerance=1e-4)
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                param.sub_(param.grad, alpha=0.1)
                param.grad = None


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_a_state_dict_between_two_forwards(pools, executor):
    pools(2).run(state_dict_between_forwards, executor)


def head_of_one_row(executor: str, folder: str) -> None:
    """Of which rank 1 has none, and sees no write to it; and two models that train in turns."""
    model = wrapped(
        nn.ModuleDict({"d": nn.Linear(DIM, DIM), "g": nn.Linear(DIM, 1)}), mp_policy=None
    )
    x = torch.ones(2, DIM, requires_grad=True)
    dcp.save({"g": model["g"].state_dict()}, checkpoint_id=folder)
    run = run_of(model["g"], executor)
    before = run(x).detach()
    for param in model["g"].parameters():
        param.data.zero_()
    model.unshard()
    assert not run(x).any()
    dcp.load({"g": model["g"].state_dict()}, checkpoint_id=folder)
    assert torch.equal(run(x).detach(), before)
    loss = run(x).sum()
    optimizer = torch.optim.SGD(model["d"].parameters(), lr=0.1)
    for _ in range(2):
        model["d"](x.detach()).sum().backward()
        optimizer.step()
    loss.backward()


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_what_some_rank_has_no_rows_of(pools, executor, tmp_path):
    pools(2).run(head_of_one_row, executor, str(tmp_path / "head"))


def experts_of_some_ranks() -> None:
    """Ranks 0 and 1 have one expert, 2 and 3 another; what is new is compared on its own mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    model = nn.ModuleDict(
        {"dense": nn.Linear(4, 4), f"expert{dist.get_rank() // 2}": nn.Linear(4, 4)}
    )
    (_, dense), (_, expert) = model.items()
    for part, its in ((expert, mesh["edp"]), (dense, None)):
        simple_fsdp(part, its)
        part.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for _ in range(2):
        expert(dense(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weights.append(expert(torch.ones(2, 4)))
    assert not torch.equal(*weights)


@pytest.mark.slow
def test_kept_experts_of_some_ranks(pools):
    pools(4).run(experts_of_some_ranks)


class Halved(nn.Linear):
    """Saves its weight in another form, as layers do that hold it scaled."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] / 2

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict = {**state_dict, prefix + "weight": state_dict[prefix + "weight"] * 2}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Renamed(nn.Linear):
    """Saves its weight by another name."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")


def by_pointer(state, key):
    state[key].to_local().numpy().fill(0)


def by_its_name(state, key):
    state[key].zero_()


@pytest.mark.parametrize("write", [by_pointer, by_its_name])
@pytest.mark.parametrize("build", [nn.Linear, Renamed])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_what_is_written_to_a_state_dict_is_noticed(solo_mesh, executor, build, write):
    model = simple_fsdp(nn.Sequential(build(4, 4, bias=False)), solo_mesh)
    run, x = run_of(model, executor), torch.ones(2, 4)
    with torch.no_grad():
        model.unshard()
        assert run(x).any()
        state = model.state_dict()
        write(state, next(iter(state)))
        assert not run(x).any()


def test_a_state_dict_of_the_parameters_themselves_leaves_them(solo_mesh):
    """An optimizer that knows no DTensors may have their local tensors."""
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    before = [param._local_tensor for param in model.parameters()]
    model.state_dict(keep_vars=True)
    assert all(p._local_tensor is t for p, t in zip(model.parameters(), before, strict=True))


def test_what_a_layer_itself_saves_stays(solo_mesh):
    model = simple_fsdp(nn.Sequential(Halved(4, 4, bias=False)), solo_mesh)
    before = model[0].weight.full_tensor().clone()
    state = model.state_dict()
    assert torch.equal(state["0.weight"].full_tensor(), before / 2)
    model.load_state_dict(state)
    assert torch.equal(model[0].weight.full_tensor(), before)


def test_a_copys_parameters_were_not_seen_before(solo_mesh):
    """The parameter that one was copied from may be gone, and its ``id`` the copy's."""
    model = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    model(torch.ones(2, 4))
    marks = [set(p.__dict__) for m in (model, copy.deepcopy(model)) for p in m.parameters()]
    assert "_simple_fsdp_storage" in marks[0] and "_simple_fsdp_storage" not in marks[2]


def moved(one, whole):
    one.to("cpu")  # swaps the tensors of its parameters, though they are there


def loaded_by_swap(one, whole):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        one.load_state_dict(one.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("swap", [moved, loaded_by_swap])
def test_one_of_two_that_are_tied_is_swapped(solo_mesh, swap):
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "other": nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    simple_fsdp(model, solo_mesh)
    model.unshard()
    swap(model["one"], model)
    with torch.no_grad():
        model["one"].weight.zero_()
        model["other"].bias.zero_()
    assert not model["other"](torch.ones(1, 4)).any()
    assert not model["one"](torch.ones(1, 4)).any()


def test_of_a_copy_nothing_is_kept(solo_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    model.unshard()
    other = copy.deepcopy(model)
    for param in other.parameters():
        torch._foreach_zero_([param.to_local().detach()])
        param.data.zero_()  # as torch's average of weights does, unseen
    assert not other(torch.ones(2, DIM)).any()
    other.unshard()
    assert not other(torch.ones(2, DIM)).any() and model(torch.ones(2, DIM)).any()


def listed(params):
    torch._foreach_mul_(params, 2)


def averaged(params):
    torch._foreach_lerp_(params, [torch.ones_like(p) for p in params], 0.5)


def data(params):
    params[0].data.mul_(2)


def filled(params):
    params[0].data.fill_(2)


def local(params):
    params[0].to_local().mul_(2)


def test_what_is_kept_of_shards_that_were_made_in_inference_mode(solo_mesh):
    """Their versions do not grow."""
    model, x = simple_fsdp(nn.Linear(4, 3, bias=False), solo_mesh), torch.ones(2, 4)
    with torch.inference_mode():
        weights = {name: param.clone() for name, param in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.unshard()
    with torch.inference_mode():
        assert model(x).any()
        model.weight.to_local().zero_()
        assert not model(x).any()


def test_nothing_is_left_of_what_was_kept(solo_mesh):
    weights = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    model, gone = simple_fsdp(nn.Linear(4, 3), solo_mesh), simple_fsdp(nn.Linear(4, 3), solo_mesh)
    gc.collect()
    before = len(_kept_of_memory), len(_replaced)
    gone.unshard()
    del gone
    for _ in range(3):
        model.load_state_dict(weights, assign=True)
        model.unshard()
        model(torch.ones(2, 4))
        model.reshard()
    gc.collect()
    assert (len(_kept_of_memory), len(_replaced)) == before


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_compiled_code_holds_nothing_that_it_was_called_with(solo_mesh, executor):
    """Its first batch, shards that others have replaced, full parameters until ``reshard``."""
    model = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    run, x = run_of(model, executor), torch.ones(2, 4)
    model.unshard()
    full = model.__dict__[KEPT]["weight"]
    held = [weakref.ref(tensor) for tensor in (x, full, model.weight.to_local())]
    run(x).sum().backward()
    model.reshard()
    model.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(3)}, assign=True)
    del x, full
    gc.collect()
    assert [ref() is None for ref in held] == [True, True, True]
    run(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", [listed, averaged, data, filled, local])
def test_what_is_kept_follows_what_is_written_without_an_optimizer(solo_mesh, executor, write):
    """An average of models, say, that is unsharded to be evaluated."""
    model = simple_fsdp(nn.Linear(4, 3, bias=False), solo_mesh)
    run, x = run_of(model, executor), torch.ones(2, 4)
    with torch.no_grad():
        model.unshard()
        before = run(x)
        assert torch.equal(run(x), before)
        write(list(model.parameters()))
        after = run(x)
        model.reshard()
        assert not torch.equal(after, before) and torch.equal(after, model(x))


def test_what_is_kept_follows_an_optimizer_whose_step_is_compiled(solo_mesh):
    model = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(2, 4)
    step = torch.compile(optimizer.step, backend="aot_eager")
    losses = []
    for _ in range(3):
        model.unshard()
        losses.append(model(x).square().sum())
        losses[-1].backward()
        step()
        optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2]


def test_parameters_are_saved_without_what_is_kept_of_them(solo_mesh, tmp_path):
    model = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    model.unshard()
    torch.save(dict(model.named_parameters()), tmp_path / "params.pt")
    loaded = torch.load(tmp_path / "params.pt", weights_only=True)
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name].to_local(), param.to_local())
    other = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    other._parameters.update(loaded)
    other.unshard()
    x = torch.ones(2, 4)
    assert torch.equal(other(x), model(x))


def test_only_what_is_written_is_gathered_again(solo_mesh):
    model = simple_fsdp(nn.Linear(4, 3), solo_mesh)
    model.unshard()
    params = list(model.parameters())
    with torch.no_grad():
        torch._foreach_add_([torch.zeros_like(p) for p in params], params)  # reads them
    versions = [p.__dict__["_simple_fsdp_kept_of"].version for p in params]
    assert min(versions) >= 0


class Asked(nn.Linear):
    def get_extra_state(self):
        return torch.is_grad_enabled()

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_state_dict_leaves_the_mode_of_gradients(solo_mesh, mode):
    model = simple_fsdp(Asked(4, 3), solo_mesh)
    with mode():
        assert model.state_dict()["_extra_state"] == torch.is_grad_enabled()


def test_unshard_for_inference_and_then_train(solo_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    with torch.inference_mode():
        model.unshard()
        model(*rows(0))
        model.set_requires_gradient_sync(False)
    mean(run_of(model, "aot_eager")(*rows(0))).backward()
    mean(model(*rows(0))).backward()
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(fake_mesh, reshard):
    model = simple_fsdp(
        nn.Sequential(Mlp(), Mlp()), fake_mesh(2), reshard_after_forward=not reshard
    )
    model.set_reshard_after_forward(reshard)
    model[1].set_reshard_after_forward(not reshard)
    with capture() as graphs:
        run_of(model, "aot_eager")(torch.ones(2, DIM)).sum().backward()
    found = {fqn.partition(".")[0] for fqn in gathers(graphs.backward[0])}
    assert found == ({"0"} if reshard else {"1"})


def divided(executor, mode, factor):
    """Against FSDP2 itself, and against one process: a sum over ranks, divided by ``factor``."""
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(), Mlp())
    ours, theirs = wrapped(plain, mode), copy.deepcopy(plain)
    mesh = next(ours.parameters()).device_mesh
    fully_shard(theirs, mesh=mesh)
    for model in (ours, theirs):
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)  # gloo can do no other, FSDP2 wants it said
    mean(run_of(ours, executor)(*mine(rows(0)))).backward()
    mean(theirs(*mine(rows(0)))).backward()
    mean(plain(*rows(0))).backward()
    for fqn, param in plain.named_parameters():
        wanted = param.grad * (dist.get_world_size() / factor)
        check_close(ours.get_parameter(fqn).grad, wanted, 1e-5, fqn)
        check_close(theirs.get_parameter(fqn).grad, wanted, 1e-5, fqn)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_gradients_divided_otherwise(pools, executor):
    pools(2).run(divided, executor, "fully_shard", 1.0)


def test_gradients_of_a_hybrid_mesh_divided_otherwise(pools):
    pools(4).run(divided, "eager", "hybrid_shard", 8.0)


def test_sums_where_nccl_could_average(fake_mesh):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    simple_fsdp(model, fake_mesh(2, device="cuda"))
    spec = model.__dict__["_simple_fsdp_layouts"]["weight"].spec
    assert spec.averages
    model.set_force_sum_reduction_for_comms(True)
    assert not model.__dict__["_simple_fsdp_layouts"]["weight"].spec.averages


def test_nothing_waits_for_a_last_backward(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    model.set_is_last_backward(False)
    with capture() as graphs:
        run_of(model, "aot_eager")(torch.ones(2, DIM)).sum().backward()
    assert reduces(graphs.backward[0])
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_bad_arguments_are_named(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    for name in ("reshard_after_forward", "reshard_after_backward", "requires_all_reduce"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got NoneType"):
            getattr(model, f"set_{name}")(None)
    with pytest.raises(TypeError, match="factor: expected a number, got str"):
        model.set_gradient_divide_factor("2")
    with pytest.raises(ValueError, match="factor: expected a number > 0, got 0"):
        model.set_gradient_divide_factor(0)
    model.set_force_sum_reduction_for_comms(False)  # as it is
    model.set_force_sum_reduction_for_comms(True)
    with pytest.raises(ValueError, match="enable: expected True"):
        model.set_force_sum_reduction_for_comms(False)


def test_a_factor_of_an_inner_module_stays(fake_mesh):
    mesh = fake_mesh(2)
    model = simple_fsdp(nn.Sequential(Mlp(), Mlp()), mesh)
    model[0].set_gradient_divide_factor(8.0)
    model.set_gradient_divide_factor(2.0)

    def factors(part):
        layouts = (m.__dict__["_simple_fsdp_layouts"] for m in part.modules())
        return {layout.spec.divide_factor for each in layouts for layout in each.values()}

    assert (factors(model[0]), factors(model[1])) == ({8.0}, {2.0})
    model[0].set_gradient_divide_factor(4.0)
    assert factors(model[0]) == {4.0}

    parts = nn.Sequential(simple_fsdp(Mlp(), mesh), Mlp())
    simple_fsdp(parts, mesh).set_gradient_divide_factor(2.0)
    assert (factors(parts[0]), factors(parts[1])) == ({None}, {2.0})  # as under FSDP2


def test_gradient_sync_takes_the_all_reduce_along(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    assert sync_of(model) == Sync()


@pytest.mark.parametrize("call", ["unshard", "set_reshard_after_backward"])
def test_what_has_no_values_is_not_kept(fake_mesh, call):
    with torch.device("meta"):
        model = nn.Sequential(Mlp())
    simple_fsdp(model, fake_mesh(2))
    with pytest.raises(ValueError, match=r"0\.\S+: is on the meta device.*init_weights"):
        getattr(model, call)(*([False] if call != "unshard" else []))


def test_a_wrapped_module_is_no_fsdp_module(fake_mesh):
    """torch's pipeline stages would go on to reach into FSDP2's state."""
    assert not isinstance(simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2)), FSDPModule)
