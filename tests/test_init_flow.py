"""``to_empty`` and the model's own initialisation, as FSDP2's users write them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import init_flow, rank_guard, simple_fsdp


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.square = nn.Parameter(torch.empty(5, 6))
        self.pair = nn.ParameterList([torch.empty(3), torch.empty(7)])

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.square)
        one, other = self.pair[0], self.pair[1]  # holds on to both
        one.data.normal_()
        other.data.normal_()


class Net(nn.Module):
    """An embedding with a zero row, tied to the head; orthogonal matrices; slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        self.scale.data.fill_(0.5)

    def init_weights(self) -> None:
        """As torchtitan's models do: the root writes to the parameters of its parts."""
        with torch.no_grad():
            self.embed.weight.normal_(std=0.5)
            self.embed.weight[3].zero_()
            for layer in self.layers:
                layer.reset_parameters()
                nn.init.trunc_normal_(layer.up.weight, std=0.02)
                layer.up.bias[:2] = 1.0
                layer.up.bias[2:].uniform_()
        self.reset_parameters()


def own_methods(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def by_apply(model: nn.Module) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.xavier_normal_(module.weight)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
            if getattr(module, "padding_idx", None) is not None:
                module.weight.data[module.padding_idx].zero_()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    model.apply(init)


def by_root(model: nn.Module) -> None:
    model.init_weights()


FLOWS = [own_methods, by_apply, by_root]


def meta_net() -> nn.Module:
    with torch.device("meta"):
        return Net()


def plain_values(flow) -> dict[str, torch.Tensor]:
    model = meta_net().to_empty(device="cpu")
    model.head.weight = model.embed.weight
    torch.manual_seed(7)
    flow(model)
    return dict(model.named_parameters())


def counting(read, pending: list[int]):
    """``read``, that notes how many full parameters there are after each call."""

    def read_and_count(param):
        full = read(param)
        pending.append(len(init_flow._flow.pending))
        return full

    return read_and_count


def compare_with_plain(rank_seed: int) -> list[int]:
    """Every flow, sharded, hybrid and replicated, ends with the values of the plain model."""
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    cases = [("fully_shard", (ranks,)), ("replicate", (ranks,))]
    cases += [("hybrid_shard", (2, ranks // 2))] if ranks > 2 else []
    pending: list[int] = []
    original = init_flow.full_parameter
    init_flow.full_parameter = counting(original, pending)
    try:
        for flow in FLOWS:
            wanted = plain_values(flow)
            for mode, shape in cases:
                model = simple_fsdp(meta_net(), init_device_mesh("cpu", shape), mode=mode)
                model.to_empty(device="cpu")
                torch.manual_seed(7 + rank * rank_seed)
                flow(model)
                for fqn, param in model.named_parameters():
                    assert torch.equal(param.detach().full_tensor(), wanted[fqn]), (flow, fqn)
                assert model.head.weight is model.embed.weight
    finally:
        init_flow.full_parameter = original
    return pending


@pytest.mark.parametrize("ranks", [2, 4])
def test_flows_end_with_the_plain_models_values(pools, ranks):
    pending = pools(ranks).run(compare_with_plain, 0)[0]
    # The pair of ``Layer`` is held by its initialiser; nothing else is ever held beside another.
    cases, layers = len(FLOWS) * (2 if ranks == 2 else 3), 2
    assert max(pending) == 2 and pending.count(2) == cases * layers


def test_ranks_that_were_seeded_differently_take_rank_0s_values(pools):
    pools(2).run(compare_with_plain, 1)


def test_an_initialised_model_may_be_scaled(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    before = layer.weight.to_local().clone()

    def halve(module: nn.Module) -> None:
        module.weight.data.mul_(0.5)

    layer.apply(halve)
    assert torch.equal(layer.weight.to_local(), before / 2)


def test_a_flow_that_raises_leaves_no_full_parameter_behind(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)

    def fail(module: nn.Module) -> None:
        module.weight.data.zero_()
        raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        layer.apply(fail)
    assert not init_flow.initialising()
    assert layer.weight is layer.get_parameter("weight")


# --- to_empty and nothing else --------------------------------------------------------------------


def emptied(mesh, around=lambda model: model) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight  # tied
    simple_fsdp(model, mesh)
    around(model).to_empty(device="cpu")
    return model


def parent(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.model = model
    return outer


@pytest.mark.parametrize("around", [lambda model: model, parent], ids=["itself", "its_parent"])
@pytest.mark.parametrize("twice", [False, True])
def test_an_empty_model_does_not_train(fake_mesh, around, twice):
    model = emptied(fake_mesh(2), around)
    if twice:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        model.to_empty(device="cpu")
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    for call in (model, compiled):
        with pytest.raises(ValueError, match=r"0\.weight.*: to_empty\(\) gave memory but nothing"):
            call(torch.ones(2, 4))


def test_what_got_values_is_read(solo_mesh):
    model = emptied(solo_mesh)
    nn.init.ones_(model[0].weight)
    with pytest.raises(ValueError, match=r"0\.bias: to_empty\(\) gave memory"):
        model(torch.ones(2, 4))
    model.load_state_dict(
        {
            k: torch.ones_like(v)
            for k, v in nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
            .state_dict()
            .items()
        }
    )
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 20.0))


def initialise_alone() -> str:
    layer = simple_fsdp(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    if torch.distributed.get_rank() == 1:
        return ""
    init_flow.agree = functools.partial(rank_guard.agree, timeout_s=0.2)
    try:
        layer.apply(lambda module: module.weight.data.zero_())
    except rank_guard.RankMismatchError as error:
        return str(error)
    finally:
        init_flow.agree = rank_guard.agree
    return ""


def test_a_rank_that_initialises_alone_is_told(pools):
    said = pools(2).run(initialise_alone)[0]
    assert "Linear.apply(), which reads parameters: after 0.2 s, ranks 1 have not got" in said
    pools(2).stop()  # the turns of the two ranks are out of step now
