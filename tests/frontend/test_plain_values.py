"""``load_state_dict`` of a plain model's tensors: all ranks must be given the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from beside import DIM, Mlp, wrapped
from torch import nn

from simplefsdp.frontend.plain_values import _are_close, _means, compare_given
from simplefsdp.rank_guard import RankMismatchError


def two(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Mlp(), nn.LayerNorm(DIM))


def message(load) -> str:
    """What ``load`` raises; nothing, if it does not."""
    try:
        load()
    except RankMismatchError as error:
        return str(error)
    return ""


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()}


def the_same() -> None:
    model, state = wrapped(two(0)), two(1).state_dict()
    holder, near = nn.Sequential(model), 1 + 1e-6 * dist.get_rank()
    loads = [
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state),  # is compared again
        lambda: model.load_state_dict(state, assign=True),
        lambda: holder.load_state_dict(prefixed(state, "0.")),
        lambda: [model[i].load_state_dict(two(1)[i].state_dict()) for i in (1, 0)],
        # Merged on each rank by itself, say.
        lambda: model.load_state_dict({k: v * near for k, v in state.items()}),
    ]
    for load in loads:
        model.load_state_dict(wrapped(two(0)).state_dict())
        load()
        for fqn, param in model.named_parameters():
            assert torch.allclose(param.full_tensor(), state[fqn], rtol=1e-4), fqn


def test_the_same(pools):
    pools(2).run(the_same)


def not_the_same() -> list[str]:
    rank, model, state = dist.get_rank(), wrapped(two(0)), two(1).state_dict()
    some = state if rank == 0 else {"1.bias": state["1.bias"]}
    mixed = [
        message(lambda: model.load_state_dict(some, strict=False)),
        message(lambda: model.load_state_dict(two(rank).state_dict())),
    ]
    with pytest.raises(RuntimeError, match="Missing key"):  # on all ranks, which compare nothing
        model.load_state_dict({"1.bias": state["1.bias"]})
    model.load_state_dict(state)
    return mixed


def test_not_the_same(own_ranks):
    told = own_ranks.run(not_the_same)
    for names, _ in told:
        assert "what load_state_dict was given is not the same on all ranks" in names
        assert "rank 0 has '0.row', rank 1 has '1.bias'" in names
    assert told[0][1] == ""
    assert "0.up.weight: load_state_dict was given other values on this rank" in told[1][1]


def on_rank_0() -> list[str]:
    model, state = wrapped(two(0)), two(1).state_dict()
    holder = nn.Sequential(model)
    if dist.get_rank():
        return []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "1")
        return [
            message(lambda: model.load_state_dict(state)),
            message(lambda: holder.load_state_dict(prefixed(state, "0."))),
        ]


def test_on_rank_0_only(own_ranks):
    """Rank 1 would have gone on with its own values: a model put together of two."""
    texts, _ = own_ranks.run(on_rank_0)
    for text in texts:
        assert "what load_state_dict was given: after 1 s, rank 1 did not get to" in text
        assert "broadcast_from_rank0=True" in text


def test_nothing_is_compared_by_one_rank(solo_mesh, monkeypatch):
    model = wrapped(two(0))
    monkeypatch.setattr("simplefsdp.frontend.plain_values._means", lambda _: pytest.fail("looked"))
    model.load_state_dict(two(1).state_dict())
    compare_given()


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6),
        torch.tensor(2.5),
        torch.ones(3, 0),
        torch.ones(2, 3, dtype=torch.bool),
        torch.randn(700, 3).t(),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(8).to(torch.float8_e4m3fn),
        torch.empty(3, device="meta"),
    ],
)
def test_means_of_any_tensor(value):
    found = _means(value)
    assert found.shape == (2,) and found.dtype == torch.float64
    assert found[1] >= found[0].abs()
    assert torch.equal(found, _means(value.clone()))


def test_how_close_means_must_be():
    one, nan = [0.1, 1.0], [float("nan"), float("nan")]
    assert _are_close(one, [0.1005, 1.0]) and not _are_close(one, [0.12, 1.0])
    assert _are_close(nan, nan) and not _are_close(one, nan)
    assert _are_close([0.0, 0.0], [0.0, 0.0])
    # Two models of other seeds.
    assert not _are_close(*(_means(two(seed)[0].up.weight.detach()).tolist() for seed in (0, 1)))
