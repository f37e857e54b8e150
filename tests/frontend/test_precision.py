"""Which dtype parameters are gathered, and gradients reduced, in: what FSDP2 of this torch does."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parity import local, mesh_for
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from simplefsdp import init_weights, simple_fsdp
from simplefsdp.frontend.arguments import dtypes_of
from simplefsdp.rank_guard import RankMismatchError

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "none": {},
    "params": {"param_dtype": BF16},
    "reduces": {"reduce_dtype": BF16},
    "same": {"param_dtype": BF16, "reduce_dtype": BF16},
    "both": {"param_dtype": BF16, "reduce_dtype": FP32},
}
since_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="since 2.15")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 6, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Kept(nn.Module):
    """Adds a parameter that stays in its own dtype to what is computed in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 6, bias=False), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return (self.linear(x).to(self.shift.dtype) * self.shift).sum(1)


def kept_shift(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.dim() == 1 else None


def both(build, policy, mark):
    """Our model and FSDP2's, of equal values."""
    torch.manual_seed(1)
    ours = build()
    theirs = copy.deepcopy(ours)
    for param in (*ours.parameters(), *theirs.parameters()) if mark is not None else ():
        param.grad_dtype = mark["dtype"]
    ours = simple_fsdp(ours, mesh_for("fully_shard"), mp_policy=policy)
    fully_shard(theirs, mesh=mesh_for("fully_shard"), mp_policy=policy)
    return ours, theirs


def compare_with_fsdp2(build, arguments, mark=None, compiled=False):
    """Gradients bit for bit, and their dtypes; returns of which a rounding to bf16 is no change."""
    if arguments.pop("override", False):
        arguments["param_dtype_override_fn"] = partial(kept_shift)  # another object on each rank
    ours, theirs = both(build, MixedPrecisionPolicy(**arguments), mark)
    options = {"executor": "aot_eager", "bucketing": "manual"}
    run = torch.compile(ours, backend="simplefsdp", options=options) if compiled else ours
    torch.manual_seed(2)
    x = local(torch.randn(2 * 5, 8))
    for model in (run, theirs):
        model(x).float().square().sum().backward()
    found = []
    for ours_param, param in zip(ours.parameters(), theirs.parameters(), strict=True):
        one, other = ours_param.grad, param.grad
        assert isinstance(one, DTensor)
        if mark != {"dtype": None}:  # of any dtype, that is: ours are then in the parameter's
            assert one.dtype == other.dtype
        same = torch.equal(one.to_local(), other.to_local().to(one.dtype))
        assert same, (dist.get_rank(), param.shape)
        found.append(one.to_local().float())
    return [torch.equal(grad, grad.to(BF16).float()) for grad in found]


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_fsdp2(pools, policy):
    rounded = pools(2).run(compare_with_fsdp2, Net, dict(POLICIES[policy]))
    in_bf16 = {"reduces", "same"} | ({"params"} if torch.__version__ < "2.15" else set())
    assert {all(each) for each in rounded} == {policy in in_bf16}


def test_so_are_those_of_compiled_code(pools):
    pools(2).run(compare_with_fsdp2, Net, {"param_dtype": BF16}, None, True)


@since_2_15
@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_may_keep_its_dtype(pools, compiled):
    """And the function that says so, another object on each rank, is no difference of ranks."""
    arguments = {"param_dtype": BF16, "override": True}
    pools(2).run(compare_with_fsdp2, Kept, arguments, None, compiled)


@since_2_15
@pytest.mark.parametrize("dtype", [BF16, FP32, None])
def test_a_grad_dtype_of_the_users(pools, dtype):
    pools(2).run(compare_with_fsdp2, Net, {"param_dtype": BF16}, {"dtype": dtype})


@since_2_15
@pytest.mark.parametrize("value", [torch.float16, "bfloat16"])
def test_what_the_function_may_not_say(fake_mesh, value):
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda param: value)
    with pytest.raises(ValueError, match=r"0\.weight: param_dtype_override_fn: expected None"):
        simple_fsdp(nn.Sequential(nn.Linear(2, 2)), fake_mesh(2), mp_policy=policy)


def ask_differently():
    def override(param: nn.Parameter) -> torch.dtype | None:
        return FP32 if dist.get_rank() == 1 else None

    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=override)
    try:
        simple_fsdp(nn.Linear(4, 4), mesh_for("fully_shard"), mp_policy=policy)
    except RankMismatchError as error:
        return str(error)
    return ""


@since_2_15
def test_ranks_that_answer_differently_are_told(pools):
    for message in pools(2).run(ask_differently):
        assert "weight" in message and "param_dtype=torch.bfloat16" in message, message


def test_a_model_cast_after_the_wrap_is_reduced_in_its_new_dtype(fake_mesh):
    model = init_weights(simple_fsdp(nn.Linear(4, 4), fake_mesh(2)))
    model.to(BF16)
    model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {BF16}
    (param,) = nn.Linear(4, 4, bias=False).parameters()
    assert dtypes_of("weight", param, MixedPrecisionPolicy()) == (None, None)
