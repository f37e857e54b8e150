"""``load_state_dict`` of a plain model's tensors: ranks compare what they were given."""

from __future__ import annotations

import copy
import io
import logging
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from beside import DIM, Mlp, call_of, check_grads, mean, mine, numbers, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend.given import _are_close, _given, _some_of
from simplefsdp.rank_guard import RankMismatchError


def two(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Mlp(), nn.LayerNorm(DIM))


def one(seed: int) -> nn.Module:
    """A rank that raises when it has gathered the parameter leaves no other gather undone."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(DIM, DIM, bias=False))


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()}


def told(compute) -> str:
    """What is raised, or logged, where ranks compute."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("simplefsdp")
    logger.addHandler(handler)
    try:
        compute()
    except RankMismatchError as error:
        return f"error: {error}"
    finally:
        logger.removeHandler(handler)
    return "\n".join(text for text in records if "load_state_dict" in text)


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def the_same() -> None:
    rank, model, state = dist.get_rank(), wrapped(two(0)), two(1).state_dict()
    holder, near = nn.Sequential(model), 1 + 1e-5 * rank
    names = list(state)
    in_turn = names if rank == 0 else names[::-1]

    def one_rank_at_a_time() -> None:  # as accelerate's main_process_first
        for turn in range(2):
            if turn == rank:
                model.load_state_dict(state)
            dist.barrier()

    def under_a_mode() -> None:
        with Idle() if rank else nullcontext():
            model.load_state_dict(state)

    def in_inference_mode() -> None:
        with torch.inference_mode():
            model.load_state_dict(state)

    loads = [
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state),  # is compared again
        lambda: model.load_state_dict(state, assign=True),
        lambda: holder.load_state_dict(prefixed(state, "0.")),
        lambda: [model[i].load_state_dict(two(1)[i].state_dict()) for i in (1, 0)],
        lambda: [model.load_state_dict({n: state[n]}, strict=False) for n in in_turn],
        lambda: model.load_state_dict({k: v * near for k, v in state.items()}),
        one_rank_at_a_time,
        under_a_mode,
        in_inference_mode,
    ]
    for load in loads:
        model.load_state_dict(wrapped(two(0)).state_dict())
        load()
        assert told(lambda: model(numbers(4, DIM))) == ""
        for fqn, param in model.named_parameters():
            assert torch.allclose(param.full_tensor(), state[fqn], rtol=1e-4), fqn
    assert not _given


def test_the_same(pools):
    pools(2).run(the_same)


def other_values() -> str:
    model = wrapped(two(0))
    model.load_state_dict(two(dist.get_rank()).state_dict())
    return told(lambda: model(numbers(4, DIM)))


def test_other_values_are_a_warning(pools):
    texts = pools(2).run(other_values)
    assert texts[0] == ""
    for text in texts[1].split("\n"):  # of each gather
        assert "load_state_dict was given other values on rank 1 than on rank 0" in text


def other_names() -> list[str]:
    """Each rank was given something else, and goes on; then all load the same."""
    model, state = wrapped(two(0)), two(1).state_dict()
    call = call_of(model, "aot_eager")
    some = state if dist.get_rank() == 0 else {"1.bias": state["1.bias"]}
    model.load_state_dict(some, strict=False)
    texts = [told(lambda: call(*mine((numbers(4, DIM),)))) for _ in range(2)]
    dist.barrier()  # else a rank may load before the other has compared
    model.load_state_dict(state)
    return [*texts, told(lambda: call(*mine((numbers(4, DIM),))))]


def test_other_names(own_ranks):
    for first, text, last in own_ranks.run(other_names):
        assert first == text and not last
        assert "a plain model's tensors, and not all of the 2 ranks" in text
    assert text.startswith("error: 1.bias: load_state_dict gave rank 1 ")


def on_rank_0(how: str) -> list[str]:
    """Rank 0 loads, and is told when it gathers, each time; then all load."""
    model, state = wrapped(one(0)), one(1).state_dict()
    call = call_of(model, "aot_eager" if how == "compiled" else "eager")
    call(numbers(2, DIM))  # an eager rank compares at the end what it has gathered, the first time

    def gather() -> None:
        if how == "unsharded":
            with unsharded(model, writeback=False):
                pass
        elif how == "unshard":
            model.unshard()
            model.reshard()
        else:
            call(numbers(2, DIM))

    if dist.get_rank() == 0:
        holder = nn.ModuleList(model.children()) if how == "in a holder" else model
        holder.load_state_dict(state)
    texts = [told(gather), told(gather)]
    dist.barrier()
    model.load_state_dict(state)
    return [*texts, told(gather)]


@pytest.mark.parametrize("how", ["eager", "compiled", "in a holder", "unsharded", "unshard"])
def test_on_rank_0_only(own_ranks, how):
    """Rank 1 would have gone on with its own values: a model put together of two."""
    (first, text, last), other = own_ranks.run(on_rank_0, how)
    assert first == text and [last, *other] == [""] * 4
    assert text.startswith("error: 0.weight: load_state_dict gave rank 0 a plain model's tensors,")
    assert "broadcast_from_rank0=True" in text


def alone() -> None:
    """All ranks load; then rank 0 computes alone, where that sends nothing."""
    x, state = numbers(2, DIM), two(1).state_dict()
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "own"))["own"]
    copies, teacher = wrapped(two(0), "replicate"), simple_fsdp(two(0), own)
    kept, student = wrapped(two(0)), wrapped(two(0))
    calls = [copies, call_of(copies, "aot_eager"), kept, teacher, call_of(teacher, "aot_eager")]
    with torch.no_grad():
        for call in calls:
            call(x)
        for model in (copies, kept, student):
            model.load_state_dict(state)
        if dist.get_rank() == 0:
            teacher.load_state_dict(state)
        kept.unshard()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIMPLEFSDP_TIMEOUT_S", "2")
            if dist.get_rank() == 0:
                assert [told(lambda call=call: call(x)) for call in calls] == [""] * len(calls)
        dist.barrier()
        for _ in range(3):  # nor is a rank that has computed more taken for one out of step
            assert [told(lambda model=model: model(x)) for model in (student, copies, kept)] == [
                ""
            ] * 3


def test_a_rank_that_gathers_nothing_waits_for_nobody(pools):
    pools(2).run(alone)


def something_else_since() -> None:
    """Rank 0 loads plain tensors, and then all get other values, which are the same."""
    model, state = wrapped(two(0)), two(1).state_dict()
    shards = {fqn: param.detach() + 1 for fqn, param in model.named_parameters()}

    def copied() -> None:
        with torch.no_grad():
            for fqn, param in model.named_parameters():
                param.copy_(shards[fqn])

    later = [
        lambda: model.load_state_dict(shards),
        lambda: model.load_state_dict(shards, assign=True),
        copied,
    ]
    for change in later:
        if dist.get_rank() == 0:
            model.load_state_dict(state)
            copy.deepcopy(model).load_state_dict(state)
        change()
        text = told(lambda: model(numbers(4, DIM)))
        assert not text.startswith("error") and (change is copied or text == "")


def test_what_has_got_another_value_since_is_no_error(pools):
    pools(2).run(something_else_since)


def own_rows() -> None:
    """All load the same; then one rank fills in a row of its part."""
    model, state = wrapped(two(0)), two(1).state_dict()
    for call in (model, call_of(model, "aot_eager")):
        model.load_state_dict(state)
        if dist.get_rank() == 0:
            model[0].up.weight.to_local()[0].detach().zero_()
        assert told(lambda call=call: call(*mine((numbers(4, DIM),)))) == ""


def test_a_rank_may_fill_in_its_own_rows(pools):
    pools(2).run(own_rows)


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


def interrupted() -> list[str]:
    """In turn: which ranks load, what, and on which ranks the forward raises then."""
    model, state = wrapped(Raises()), Raises().state_dict()
    shards = {fqn: param.detach() + 1 for fqn, param in model.named_parameters()}
    model(numbers(2, DIM))
    both: tuple[int, ...] = (0, 1)
    steps = (
        (both, state, (0,)),
        ((), state, ()),
        (both, state, (1,)),
        (both, shards, ()),
        (both, state, ()),
        ((0,), state, both),
        (both, state, both),
        (both, state, ()),
        (both, state, both),
        ((), state, ()),
        ((0,), state, ()),
        (both, state, ()),
    )
    texts = []
    for loading, values, raising in steps:
        if dist.get_rank() in loading:
            model.load_state_dict(values)
        model.raises = dist.get_rank() in raising
        with suppress(MemoryError):
            texts.append(told(lambda: model(numbers(2, DIM))).partition(":")[0])
        dist.barrier()
    return texts


def test_forwards_that_raise(own_ranks):
    ours, theirs = own_ranks.run(interrupted)
    assert [text for text in ours if text] == ["error"] and not any(theirs)


def pickled() -> None:
    model = wrapped(one(0))
    model.load_state_dict(one(1).state_dict())
    with io.BytesIO() as file:
        torch.save(dict(model.named_parameters()), file)
        file.seek(0)
        assert torch.load(file)["0.weight"].shape == (DIM, DIM)
    copy.deepcopy(model)(numbers(2, DIM))
    model(numbers(2, DIM))


def test_parameters_with_notes_are_pickled(pools):
    pools(2).run(pickled)


def into_what_a_state_gave() -> list[str]:
    """Rank 0 loads plain tensors; then all load a checkpoint into what ``state_dict()`` gave."""
    model = wrapped(one(0))
    model(numbers(2, DIM))
    if dist.get_rank() == 0:
        model.load_state_dict(one(1).state_dict())
    for value in model.state_dict().values():
        value.to_local().detach().fill_(1.0)
    texts = [told(lambda: model(numbers(2, DIM))) for _ in range(2)]
    dist.barrier()
    return texts


def test_a_checkpoint_loaded_since_is_a_warning_at_most(pools):
    ours, theirs = pools(2).run(into_what_a_state_gave)
    assert not ours[0].startswith("error") and [ours[1], *theirs] == [""] * 3


def two_of_one_name() -> list[str]:
    teacher, student, state = wrapped(one(0)), wrapped(one(0)), one(1).state_dict()
    for model in (teacher, student):
        model(numbers(2, DIM))
    teacher.load_state_dict(state)
    if dist.get_rank() == 0:
        student.load_state_dict(state)
    return [told(lambda model=model: model(numbers(2, DIM))) for model in (teacher, student)]


def test_models_of_one_name_are_told_apart(own_ranks):
    ours, theirs = own_ranks.run(two_of_one_name)
    assert ours[0] == "" and "gave rank 0 a plain model's tensors" in ours[1]
    assert theirs == ["", ""]


def optimizer_on_rank_0() -> list[str]:
    plain, model = one(0), wrapped(one(0))
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, plain))
    mean(plain(numbers(4, DIM))).backward()
    theirs.step()
    mean(model(numbers(4, DIM))).backward()
    ours.step()
    shards = copy.deepcopy(ours.state_dict())
    texts = []
    for then in (lambda: None, lambda: ours.load_state_dict(shards)):
        if dist.get_rank() == 0:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        then()
        texts.append(told(lambda: model(numbers(4, DIM))))
        dist.barrier()
    ours.load_state_dict(theirs.state_dict())
    return [*texts, told(lambda: model(numbers(4, DIM)))]


def test_an_optimizers_state_on_rank_0_only(own_ranks):
    texts, other = own_ranks.run(optimizer_on_rank_0)
    assert "error: exp_avg of 0.weight and 1 more: load_state_dict gave rank 0" in texts[0]
    assert [*texts[1:], *other] == [""] * 5


class Twice(nn.Module):
    """Gathers its one parameter several times, eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x))


def gathered_twice() -> list[str]:
    model, state = wrapped(Twice()), Twice().state_dict()
    model(numbers(2, DIM))
    texts = []
    for ranks in ((0, 1), (0,), (0,), (0, 1), (0, 1)):
        if dist.get_rank() in ranks:
            model.load_state_dict({k: v * 0 for k, v in state.items()})
        texts.append(told(lambda: model(numbers(2, DIM))))
        dist.barrier()
    return texts


def test_a_parameter_that_is_gathered_twice(own_ranks):
    ours, theirs = own_ranks.run(gathered_twice)
    assert [text.partition(":")[0] for text in ours] == ["", "error", "error", "", ""]
    assert theirs == [""] * 5


def loaded_in_forward() -> None:
    """An eager forward that gives its parameter other values, and gathers it by itself."""

    class Streams(Twice):
        def forward(self, x):
            x = self.layer(x)
            self.layer.load_state_dict({"weight": numbers(DIM, DIM, seed=2)})
            with unsharded(self.layer):
                pass
            return self.layer(x)

    model = wrapped(Streams())
    for _ in range(3):
        model.load_state_dict(Twice().state_dict() | {"layer.weight": numbers(DIM, DIM)})
        assert told(lambda: model(numbers(2, DIM))) == ""
    optimizer = torch.optim.AdamW(model.parameters())
    mean(model(numbers(2, DIM))).backward()
    optimizer.step()
    model.layer.extra = nn.Parameter(copy.deepcopy(model.layer.weight.detach()))
    more = torch.optim.AdamW(model.parameters())
    mean(model.layer.extra).backward()
    more.step()
    more.load_state_dict(more.state_dict())


def test_values_loaded_in_forward(own_ranks):
    own_ranks.run(loaded_in_forward)


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
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def assigned_tied(executor: str) -> None:
    """As for the plain model: two parameters of one memory."""
    plain, value = Tied(), numbers(DIM, DIM)
    model, state = wrapped(plain), {"a.weight": value, "b.weight": value.view(DIM, DIM)}
    for each in (plain, model):
        each.load_state_dict(copy.deepcopy(state), assign=True)
        for param in each.parameters():
            param.requires_grad_()
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
    assert torch.equal(model.a.weight.full_tensor(), model.b.weight.full_tensor())


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_tied_parameters_stay_tied(pools, executor):
    pools(2).run(assigned_tied, executor)


def test_nothing_is_compared_by_one_rank(solo_mesh):
    model = wrapped(two(0))
    model.load_state_dict(two(1).state_dict())
    assert not _given


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
def test_elements_of_any_tensor(value):
    found = _some_of(value)
    assert found.shape == (9,) and found.dtype == torch.float64
    assert torch.equal(found, _some_of(value.clone()))
    whole = value.resolve_conj().flatten().to(torch.complex64).abs()
    for place in (0, -1):
        assert float(found[1:][place].abs()) == pytest.approx(float(whole[place]))
    with torch.device("meta"):
        assert torch.equal(found, _some_of(value))


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
    assert not _some_of(value).numel()


def test_how_close_elements_must_be():
    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        return _are_close(_some_of(one).tolist(), _some_of(other).tolist())

    value, nan = torch.randn(40, 30), torch.full((9,), float("nan"))
    assert close(value, value * (1 + 1e-5)) and not close(value, value * 1.005)
    assert close(value.bfloat16(), value) and not close(value.bfloat16(), value * 1.05)
    assert not close(value, value.flip(0)) and not close(value, -value)
    assert close(nan, nan) and not close(nan, torch.ones(9))
    assert close(torch.zeros(3), torch.zeros(3)) and close(torch.ones(3), torch.empty(0))
    assert not close(*(two(seed)[0].up.weight.detach() for seed in (0, 1)))
