"""``load_state_dict`` of a plain model's tensors: ranks compare what they were given."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from beside import DIM, Mlp, call_of, mean, mine, numbers, wrapped
from ranks import RankPool
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import unsharded
from simplefsdp.frontend.plain_values import _are_close, _given, _some_of, compare_given
from simplefsdp.rank_guard import RankMismatchError


def two(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Mlp(), nn.LayerNorm(DIM))


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
        with Idle():
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
    assert "load_state_dict was given other values on rank 1 than on rank 0, and for 2" in texts[1]


def other_names(executor: str) -> str:
    """Each rank was given something else; then all load the same."""
    model, state = wrapped(two(0)), two(1).state_dict()
    call = call_of(model, executor)
    mean(call(*mine((numbers(4, DIM),)))).backward()
    some = state if dist.get_rank() == 0 else {"1.bias": state["1.bias"]}
    model.load_state_dict(some, strict=False)
    text = told(lambda: call(*mine((numbers(4, DIM),))))
    model.load_state_dict(state)
    assert told(lambda: call(*mine((numbers(4, DIM),)))) == ""
    return text


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_other_names(own_ranks, executor):
    for text in own_ranks.run(other_names, executor):
        assert "error: what load_state_dict was given is not the same on all ranks" in text
        assert "rank 0 has 'load_state_dict was given 0.down.weight', rank 1 has 'load" in text


def on_rank_0(how: str) -> str:
    """What it says; rank 1 does not wait for it here, as it would in the gather."""
    model, state = wrapped(two(0)), two(1).state_dict()
    call = call_of(model, "aot_eager" if how == "compiled" else "eager")
    if how == "compiled":
        mean(call(*mine((numbers(4, DIM),)))).backward()
    if dist.get_rank():
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        if how == "in a holder":
            nn.ModuleList(model.children()).load_state_dict(state)
        else:
            model.load_state_dict(state)
        if how == "unsharded":
            return told(lambda: unsharded(model).__enter__())
        return told(lambda: call(*mine((numbers(4, DIM),))))


@pytest.mark.parametrize("how", ["eager", "compiled", "in a holder", "unsharded"])
def test_on_rank_0_only(how):
    """Rank 1 would have gone on with its own values: a model put together of two."""
    ranks = RankPool(2)
    try:
        text, _ = ranks.run(on_rank_0, how)
    finally:
        ranks.stop()
    assert "what load_state_dict was given: after 1 s, rank 1 did not get to" in text
    assert "broadcast_from_rank0=True" in text


def another_loads_shards() -> str:
    """What was plain at first, and then a shard, is not compared."""
    model, state = wrapped(two(0)), two(1).state_dict()
    shards = {fqn: param.detach() + 1 for fqn, param in model.named_parameters()}
    if dist.get_rank() == 0:
        model.load_state_dict(state)
    model.load_state_dict(shards)
    return told(lambda: model(numbers(4, DIM)))


def test_shards_come_after(pools):
    assert pools(2).run(another_loads_shards) == ["", ""]


def optimizer_on_rank_0() -> str:
    plain, model = two(0), wrapped(two(0))
    ours, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, plain))
    mean(plain(numbers(4, DIM))).backward()
    theirs.step()
    mean(model(numbers(4, DIM))).backward()
    ours.step()
    if dist.get_rank():
        return ""
    ours.load_state_dict(theirs.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        return told(lambda: model(numbers(4, DIM)))


def test_an_optimizers_state_on_rank_0_only():
    ranks = RankPool(2)
    try:
        text, _ = ranks.run(optimizer_on_rank_0)
    finally:
        ranks.stop()
    assert "after 1 s, rank 1 did not get to what rank 0 is about to do" in text


def test_nothing_is_compared_by_one_rank(solo_mesh):
    model = wrapped(two(0))
    model.load_state_dict(two(1).state_dict())
    assert not _given
    compare_given()


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
