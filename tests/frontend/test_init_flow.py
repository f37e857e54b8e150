"""``to_empty`` and the model's own initialisation, as FSDP2's users write them."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import rank_guard, simple_fsdp
from simplefsdp.frontend import full_parameters, init_flow, placement


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


def gather_a_copy(param) -> torch.Tensor:
    return full_parameters.full_of(param).clone()


def send_a_copy(tensor, groups) -> None:
    sent = tensor.clone()
    placement.from_first_rank(sent, groups)
    tensor.copy_(sent)


def scatter_a_copy(full, mesh, placements):
    return placement.distribute(full.clone(), mesh, placements)


@contextlib.contextmanager
def transfers_by(gather=gather_a_copy, send=send_a_copy):
    """Inside, an initialiser's gathers and broadcasts are these. By default nobody refers to the
    tensors, as gloo's threads do for a moment longer; nor to the full ones that are scattered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_flow, "full_of", gather)
        patch.setattr(full_parameters, "from_first_rank", send)
        patch.setattr(full_parameters, "distribute", scatter_a_copy)
        yield


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


def compare_with_plain(rank_seed: int, transfers=contextlib.nullcontext) -> list[int]:
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
                with transfers():
                    flow(model)
                for fqn, param in model.named_parameters():
                    assert torch.equal(param.detach().full_tensor(), wanted[fqn]), (flow, fqn)
                assert model.head.weight is model.embed.weight
    finally:
        init_flow.full_parameter = original
    return pending


@pytest.mark.slow(quick=["2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_flows_end_with_the_plain_models_values(pools, ranks):
    pending = pools(ranks).run(compare_with_plain, 0, transfers_by)[0]
    # The pair of ``Layer`` is held by its initialiser; nothing else is ever held beside another.
    cases, layers = len(FLOWS) * (2 if ranks == 2 else 3), 2
    assert max(pending) == 2 and pending.count(2) == cases * layers


class Late:
    """Transfers that refer to what they gathered and sent until they are told to let go."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def gather(self, param) -> torch.Tensor:
        self.held.append(gather_a_copy(param))
        return self.held[-1]

    def send(self, tensor, groups) -> None:
        self.held.append(tensor)

    def let_go(self) -> None:
        self.held.clear()


def initialise(model: nn.Module, late: Late, init) -> None:
    with transfers_by(late.gather, late.send):
        model.apply(lambda module: init() if module is model else None)


def sizes_pending() -> list[int]:
    return [entry.full.numel() for entry in init_flow._flow.pending]


def test_a_transport_may_let_go_late(solo_mesh):
    """What it gathered or sent seems to be held at first, and is let go of once it is not."""
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 2), nn.Linear(3, 1)), solo_mesh)
    before = [param.to_local().clone() for param in model.parameters()]
    late, sizes = Late(), []

    def init() -> None:
        for fqn in ("0.weight", "0.bias", "0.weight", "1.bias"):
            model.get_parameter(fqn).data.add_(1.0)
            sizes.append(sizes_pending())
            if fqn != "0.bias":
                late.let_go()

    initialise(model, late, init)
    assert sizes == [[8], [2], [2, 8], [1]]
    for param, old, added in zip(model.parameters(), before, (2, 1, 0, 1), strict=True):
        assert torch.equal(param.to_local(), old + added)


@pytest.mark.parametrize("lets_go", [True, False])
def test_what_was_written_to_a_shard_is_read_by_name(solo_mesh, lets_go):
    """Also where a transport still refers to what was read by name before."""
    layer, late = simple_fsdp(nn.Linear(4, 2, bias=False), solo_mesh), Late()
    seen: list[torch.Tensor] = []

    def init() -> None:
        layer.weight.data.fill_(1.0)
        if lets_go:
            late.let_go()
        for shard in layer.parameters():
            with torch.no_grad():
                shard.fill_(2.0)
        seen.append(layer.weight.detach().clone())
        layer.weight.data.add_(1.0)

    initialise(layer, late, init)
    assert seen[0].eq(2).all() and layer.weight.to_local().eq(3).all()


@pytest.mark.parametrize(
    "value",
    [torch.ones(0, 4), torch.ones(()), torch.ones(2, dtype=torch.complex64), torch.ones(4, 2).t()],
    ids=["empty", "scalar", "complex", "transposed"],
)
@pytest.mark.parametrize("is_empty", [True, False])
def test_what_nobody_holds_is_let_go_of(solo_mesh, value, is_empty):
    model = nn.Module()
    model.first, model.second = (nn.Parameter(value.clone()) for _ in range(2))
    simple_fsdp(model, solo_mesh)
    if is_empty:
        model.to_empty(device="cpu")
    numbers: list[int] = []

    def init() -> None:
        for name in ("first", "second"):
            getattr(model, name).data.fill_(1.0)
            numbers.append(len(sizes_pending()))

    with transfers_by(), torch.device("meta"):  # where a trainer may have made the model
        model.apply(lambda module: init())
    assert numbers == [1, 1]


class Mixed(nn.Module):
    """As graph and recurrent networks initialise themselves, and as pretrained ones load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.bias = nn.Parameter(torch.empty(6))
        self.kept = nn.Parameter(torch.full((3,), 3.0))
        self.kept._no_reinit = True

    def reset_parameters(self) -> None:
        bound = 1 / self.weight.size(1) ** 0.5
        for param in self.parameters():
            if not getattr(param, "_no_reinit", False):
                param.data.uniform_(-bound, bound)
        self.weight.data[0].zero_()

    def init_weights(self) -> None:
        nn.init.ones_(self.weight)
        state = {name: value.full_tensor() * 2 for name, value in self.state_dict().items()}
        self.load_state_dict(state)
        if not getattr(self.kept, "_no_reinit", False):
            self.kept.data.zero_()
        self.bias.requires_grad_(False)
        self.bias.is_special = True

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        nn.init.constant_(module.weight, 4.0)


def test_parameters_by_name_and_all_of_them_in_turn(solo_mesh):
    layer = simple_fsdp(Mixed(), solo_mesh)
    layer.reset_parameters()
    weight = layer.weight.to_local()
    assert weight[0].eq(0).all() and not weight[1].eq(0).any() and weight.abs().max() <= 0.5
    assert layer.kept.to_local().eq(3).all()
    layer.init_weights()
    assert layer.weight.to_local().eq(2).all() and layer.kept.to_local().eq(6).all()
    assert not layer.bias.requires_grad and layer.bias.is_special
    layer.apply(layer._init_weights)
    assert layer.weight.to_local().eq(4).all()


def test_by_name_and_by_shard_at_once_is_refused(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    param = layer.weight

    def both(module: nn.Module) -> None:
        full = module.weight
        with torch.no_grad():
            param.fill_(1.0)
            full.fill_(2.0)

    with pytest.raises(ValueError, match=r"Linear\.apply\(\): writes to a parameter of shape"):
        layer.apply(both)


def test_hooks_set_by_an_initialiser_are_refused(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    with pytest.raises(ValueError, match=r"Linear\.apply\(\): set hooks on a parameter"):
        layer.apply(lambda module: module.weight.register_hook(lambda grad: grad))


def test_a_method_called_apply_that_computes(solo_mesh):
    class Apply(nn.Linear):
        def apply(self, x):
            return x @ self.weight

        def forward(self, x):
            return self.apply(x)

    layer = simple_fsdp(Apply(4, 4), solo_mesh)
    layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None


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


def test_an_empty_model_is_planned(fake_mesh):
    """Inside a FakeTensorMode nothing has values, and nothing is computed."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    simple_fsdp(model, fake_mesh(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
        assert compiled(torch.ones(2, 4)).shape == (2, 4)


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
    assert "Linear.apply(), which reads parameters: after 0.2 s, rank 1 did not get" in said
    pools(2).stop()  # the turns of the two ranks are out of step now


class Assigns(nn.Module):
    """Makes new parameters where others write to those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.scale = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.rand(2))
        self.weight = nn.Parameter(torch.rand(4, 3))
        self.weight.data[0] = self.scale[1]

    def forward(self, x):
        return x @ self.weight.T


def assign_and_compare() -> None:
    torch.manual_seed(3)
    plain = Assigns()
    plain.reset_parameters()
    with torch.device("meta"):
        model = Assigns()
    simple_fsdp(model, init_device_mesh("cpu", (2,))).to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    torch.manual_seed(3 + torch.distributed.get_rank())
    model.reset_parameters()
    held = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), dict(plain.named_parameters())[name]), name


def test_an_initialiser_may_assign_new_parameters(pools):
    pools(2).run(assign_and_compare)


def test_an_assigned_parameter_of_another_shape_is_refused(solo_mesh):
    model = simple_fsdp(Assigns(), solo_mesh)
    with pytest.raises(ValueError, match=r"made a parameter of shape \(4, 3\)"):
        model.apply(lambda module: setattr(module, "weight", nn.Parameter(torch.ones(5, 3))))


def test_a_model_that_is_emptied_after_it_was_compiled(fake_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    compiled(torch.ones(2, 4))
    model.to_empty(device="cpu")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias: to_empty\(\) gave memory"):
            compiled(torch.ones(2, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    compiled(torch.ones(2, 4))
