"""``load_state_dict`` of a plain model's tensors: each rank keeps its part, and ranks compare."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import DIM, Mlp, call_of, check_grads, mean, mine, numbers, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import init_weights, rank_sequence, simple_fsdp, unsharded
from simplefsdp.frontend.loaded import _digest
from simplefsdp.rank_guard import RankMismatchError

Load = Callable[[nn.Module, dict[str, Any]], object]


def two(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Mlp(), nn.LayerNorm(DIM))


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()}


def forward(model: nn.Module) -> None:
    model(*mine((numbers(4, DIM),)))


def told(*calls: Callable[[], object]) -> str:
    """What this rank is told of ``calls``, if all that is gathered in them is compared at last: an
    error, or a warning."""
    group, records = dist.group.WORLD.group_name, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sequence, "_sequences", type(rank_sequence._sequences)())
        patch.setattr(rank_sequence, "FIRST", 10**6)  # not before
        patch.setattr(rank_sequence.log, "handlers", [handler])
        for call in calls:
            call()
        end = rank_sequence._sequences[dist.group.WORLD][group]
        end._next = end._sums.sent + 1
        for rank in range(2):
            dist.barrier()
            try:
                if dist.get_rank() == rank:
                    rank_sequence.note(group, rank_sequence.gathered(["the end"]))
            except RankMismatchError as error:
                return f"error: {error}"
    return "".join(f"warning: {text}" for text in records if "load_state_dict" in text)


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def one_rank_at_a_time(model: nn.Module, state: dict) -> None:  # as main_process_first
    for turn in range(2):
        if turn == dist.get_rank():
            model.load_state_dict(state)
        dist.barrier()


def under_a_mode(model: nn.Module, state: dict) -> None:
    with Idle():
        model.load_state_dict(state)


def in_inference_mode(model: nn.Module, state: dict) -> None:
    with torch.inference_mode():
        model.load_state_dict(state)


def assigned(model: nn.Module, state: dict) -> None:
    model.load_state_dict(state, assign=True)


def in_a_holder(model: nn.Module, state: dict) -> None:
    nn.Sequential(model).load_state_dict(prefixed(state, "0."))


def by_each_module(model: nn.Module, state: dict) -> None:
    for i in (1, 0):
        model[i].load_state_dict({k[2:]: v for k, v in state.items() if k[0] == str(i)})


def in_another_order(model: nn.Module, state: dict) -> None:
    for name in list(state)[:: 1 if dist.get_rank() else -1]:
        model.load_state_dict({name: state[name]}, strict=False)


def one_rank_writes_its_own_rows(model: nn.Module, state: dict) -> None:
    model.load_state_dict(state)
    if dist.get_rank() == 0:
        own = model[0].up.weight.to_local().detach()
        own.copy_(own.clone())


def one_rank_loads_shards_first(model: nn.Module, state: dict) -> None:
    shards = wrapped(two(1)).state_dict()
    if dist.get_rank() == 0:
        model.load_state_dict(shards)
    model.load_state_dict(state)


def loaded_alike(load: Load) -> None:
    model, state = wrapped(two(0)), two(1).state_dict()
    compiled = call_of(model, "aot_eager")

    def twice() -> None:
        for call in (model, compiled, model):
            call(*mine((numbers(4, DIM),)))

    for _ in range(2):  # it is compared again
        with torch.no_grad():
            assert told(lambda: load(model, state), twice) == ""
    for fqn, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), state[fqn]), fqn
    assert not any(module.__dict__.get("_simple_fsdp_loaded") for module in model.modules())


@pytest.mark.parametrize(
    "load",
    [
        nn.Module.load_state_dict,
        assigned,
        in_a_holder,
        by_each_module,
        in_another_order,
        one_rank_at_a_time,
        under_a_mode,
        in_inference_mode,
        one_rank_writes_its_own_rows,
        one_rank_loads_shards_first,
    ],
)
def test_the_same(pools, load):
    pools(2).run(loaded_alike, load)


def something_else(how: str, executor: str) -> str:
    """What a rank is told; the ranks load something else, by ``how``."""
    rank, model, state = dist.get_rank(), wrapped(two(0)), two(1).state_dict()
    call = call_of(model, executor)

    def load() -> None:
        if how == "names":
            own = state if rank == 0 else {"1.bias": state["1.bias"]}
            model.load_state_dict(own, strict=False)
        elif rank == 0 and how == "in a holder":
            nn.Sequential(model).load_state_dict(prefixed(state, "0."))
        elif rank == 0:
            model.load_state_dict(state)

    def compute() -> None:
        call(*mine((numbers(4, DIM),)))

    def read() -> None:
        with unsharded(model, writeback=False):
            pass

    before = {
        "read before": read,
        "kept": model.unshard,
        "layer by layer": lambda: model[1](model[0](numbers(4, DIM))),
        "a copy": lambda: call_of(copy.deepcopy(model), executor)(*mine((numbers(4, DIM),))),
    }
    return told(load, before.get(how, lambda: None), compute)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "how",
    ["rank 0 only", "names", "in a holder", "a copy", "read before", "kept", "layer by layer"],
)
def test_something_else(pools, how, executor):
    """Else a model put together of two would be trained."""
    first, text = pools(2).run(something_else, how, executor)
    assert first == ""  # it ends when the others do
    theirs = "1.bias" if how == "names" else "nothing"
    more = 11 if how == "a copy" else 5
    wanted = (
        f"error: load_state_dict gave rank 0 plain tensors for 0.row and {more} more, and rank 1 "
    )
    assert text.startswith(f"{wanted}for {theirs}, ")
    assert "broadcast_from_rank0=True" in text


def uncertain() -> list[str]:
    """Other values, of which some are rounded, or only a rank's own rows; and values that all
    ranks have written since, unseen."""
    rank, state = dist.get_rank(), two(1).state_dict()
    texts = []

    def written(model: nn.Module) -> None:
        if rank == 0:
            model.load_state_dict(state)
        for param in model.parameters():
            param.to_local().detach().fill_(1.0)

    for load in (
        lambda model: model.load_state_dict(two(rank).state_dict()),
        lambda model: model.load_state_dict({k: v * (1 + rank / 2**20) for k, v in state.items()}),
        written,
    ):
        model = wrapped(two(0))
        loaded = functools.partial(load, model)
        texts.append(told(loaded, functools.partial(forward, model)))
    with Idle() if rank else nullcontext():
        model.load_state_dict(state)
    return [*texts, told(lambda: forward(model))]


def test_what_may_be_right_is_a_warning(pools):
    first, texts = pools(2).run(uncertain)
    assert first == [""] * 4
    other = "warning: load_state_dict gave rank 1 other values than rank 0, of 0.row and 5 more. "
    assert [text.startswith(other) for text in texts] == [True, True, False, True]
    assert texts[2].startswith("warning: load_state_dict gave rank 0 plain tensors for 0.row and 5")
    assert "for nothing" in texts[2] and "all ranks have given these parameters" in texts[2]


def fill(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.5)


def alike_since() -> None:
    """Rank 0 loads plain tensors; then all get other values, which are the same."""
    model, state = wrapped(two(0)), two(1).state_dict()
    shards = wrapped(two(2)).state_dict()

    def written() -> None:
        with unsharded(model):
            for param in model.parameters():
                param.detach().zero_()

    changes = [
        lambda: model.load_state_dict(shards),
        lambda: model.load_state_dict(shards, assign=True),
        lambda: model.load_state_dict(state),
        lambda: init_weights(model, init_fn=fill),
        written,
    ]
    for change in changes:
        load = (lambda: model.load_state_dict(state)) if dist.get_rank() == 0 else (lambda: None)
        assert told(load, change, lambda: forward(model)) == ""


def test_what_all_ranks_got_since_is_not_told(pools):
    pools(2).run(alike_since)


def alone() -> None:
    """Rank 0 loads and computes alone, where that sends nothing."""
    x, state = numbers(2, DIM), two(1).state_dict()
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "own"))["own"]
    copies, teacher = wrapped(two(0), "replicate"), simple_fsdp(two(0), own)
    student = wrapped(two(0))

    calls = [copies, call_of(copies, "aot_eager"), teacher, call_of(teacher, "aot_eager")]

    def compute() -> None:
        for model in (copies, teacher) if dist.get_rank() == 0 else ():
            model.load_state_dict(state)
        for call in calls if dist.get_rank() == 0 else ():
            call(x)

    with torch.no_grad():
        for call in calls:
            call(x)
        assert told(compute, lambda: forward(student)) == ""


def test_a_rank_that_gathers_nothing_is_not_compared(pools):
    pools(2).run(alone)


class Raises(nn.Module):
    """Raises when it has gathered its parameter, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.raises = nn.Linear(DIM, DIM, bias=False), False

    def forward(self, x):
        x = self.layer(x)
        if self.raises:
            raise MemoryError
        return x


def interrupted() -> None:
    model, state = wrapped(Raises()), Raises().state_dict()

    def once(raises: bool) -> None:
        model.raises = raises
        with suppress(MemoryError):
            model(numbers(2, DIM))
        dist.barrier()

    once(False)
    mine = dist.get_rank() == 0
    both = lambda: model.load_state_dict(state)  # noqa: E731
    assert told(both, lambda: once(mine), lambda: once(False)) == ""
    assert told(both, lambda: once(True), both, lambda: once(not mine), lambda: once(False)) == ""


def test_forwards_that_raise(own_ranks):
    own_ranks.run(interrupted)


def pickled() -> None:
    model = wrapped(two(0))

    def keep() -> None:
        model.load_state_dict(two(1).state_dict())
        with io.BytesIO() as file:
            torch.save(dict(model.named_parameters()), file)
            file.seek(0)
            assert torch.load(file)["1.weight"].shape == (DIM,)

    assert told(keep, lambda: forward(copy.deepcopy(model)), lambda: forward(model)) == ""


def test_loaded_parameters_are_pickled_and_copied(pools):
    pools(2).run(pickled)


def optimizer_on_rank_0() -> list[str]:
    plain, model = two(0), wrapped(two(0))
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, plain))
    mean(plain(numbers(4, DIM))).backward()
    theirs.step()
    mean(model(numbers(4, DIM))).backward()
    ours.step()
    shards, state = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    load = (lambda: ours.load_state_dict(state)) if dist.get_rank() == 0 else (lambda: None)
    step = lambda: forward(model)  # noqa: E731
    return [
        told(load, step),
        told(load, lambda: ours.load_state_dict(shards), step),
        told(lambda: ours.load_state_dict(state), step),
    ]


def test_an_optimizers_state_on_rank_0_only(pools):
    first, (text, *others) = pools(2).run(optimizer_on_rank_0)
    assert text.startswith("error: load_state_dict gave rank 0 plain tensors for exp_avg of 0.")
    assert [*first, *others] == [""] * 5


class Twice(nn.Module):
    """Gathers its one parameter several times, eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x))


class Streams(Twice):
    """Gives its parameter other values in the middle, and gathers it by itself."""

    def forward(self, x):
        x = self.layer(x)
        self.layer.load_state_dict({"weight": numbers(DIM, DIM, seed=2)})
        with unsharded(self.layer, writeback=False):
            pass
        return self.layer(x)


def loaded_in_forward() -> None:
    state = Twice().state_dict() | {"layer.weight": numbers(DIM, DIM)}
    for cls in (Twice, Streams):
        model = wrapped(cls())
        assert told(lambda model=model: (model.load_state_dict(state), forward(model))) == ""


def test_values_loaded_in_forward(pools):
    pools(2).run(loaded_in_forward)


class Renaming(nn.Linear):
    """It was called otherwise once."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state_dict, prefix, *_) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


def test_what_a_hook_renames_is_sharded(solo_mesh):
    model = simple_fsdp(nn.Sequential(Renaming()), solo_mesh)
    state = {"0.kernel": numbers(DIM, DIM), "0.bias": numbers(DIM)}
    model.load_state_dict(state)
    assert torch.equal(model[0].weight.full_tensor(), state["0.kernel"])


class Tied(nn.Module):
    """With two more names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.b.weight = self.a.more = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x) @ self.a.more))


def assigned_tied(executor: str, holds: bool) -> None:
    """As for the plain model: parameters of one memory."""
    plain, value = Tied(), numbers(DIM, DIM)
    model, names = wrapped(Tied()), ("a.weight", "a.more", "b.weight")
    state = {name: value.view(DIM, DIM) for name in names}
    for each in (plain, model):
        into, prefix = (nn.ModuleList([each]), "0.") if holds else (each, "")
        into.load_state_dict(prefixed(copy.deepcopy(state), prefix), assign=True)
        for param in each.parameters():
            param.requires_grad_()
    other = wrapped(Tied())
    other.load_state_dict(state, assign=True)  # is another model
    call = call_of(model, executor)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        x = numbers(4, DIM, seed=step)
        mean(plain(x)).backward()
        mean(call(*mine((x,)))).backward()
        check_grads(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for weight in (model.a.weight, model.b.weight, model.a.more):
        assert torch.equal(weight.full_tensor(), model.a.weight.full_tensor())
    assert torch.equal(other.a.weight.full_tensor(), value)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_tied_parameters_stay_tied(pools, executor, holds):
    pools(2).run(assigned_tied, executor, holds)


def test_nothing_is_compared_by_one_rank(solo_mesh):
    model = wrapped(two(0))
    model.load_state_dict(two(1).state_dict())
    assert "_simple_fsdp_loaded" not in model[0].up.__dict__


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6),
        torch.tensor(2.5),
        torch.ones(2, 3, dtype=torch.bool),
        torch.randn(700, 3).t(),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(2, 3, dtype=torch.complex64).conj(),
        torch.randn(8).to(torch.float8_e4m3fn),
    ],
)
def test_digests_of_any_tensor(value):
    found = _digest(value)
    assert len(found) == 8 and found == _digest(value.clone())
    other = value.clone().contiguous()
    other.view(-1)[-1:] = 0 if other.dtype == torch.bool else 7
    assert found != _digest(other)
    with torch.device("meta"):
        assert found == _digest(value)
    with Idle() if value.dim() else nullcontext():
        assert _digest(value) == ("" if value.dim() else found)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 0),
        torch.empty(3, device="meta"),
        torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {})),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
)
def test_tensors_without_elements_to_see(value):
    assert _digest(value) == ""
