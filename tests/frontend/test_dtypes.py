"""Parameters of dtypes that not every backend sends, adds up or computes with: complex, float8."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import clip_grad_norm_, microbatch, simple_fsdp, unsharded

POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)


class Turns(nn.Module):
    """Complex parameters: rows that two ranks do not share evenly, a vector, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(0)
        for name, shape in (("turn", (5, 3)), ("phase", (3,)), ("scale", ())):
            value = torch.randn(shape, dtype=torch.complex64, generator=values)
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        return ((x * self.phase) @ self.turn.T.conj() * self.scale).imag.square().sum()


def batch(rank: int, i: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(7 * rank + i))


def reference(batches: list[torch.Tensor]) -> nn.Module:
    plain = Turns()
    (sum(plain(x) for x in batches) / 2).backward()
    return plain


def compare(model: nn.Module, plain: nn.Module, *, exactly: bool = True) -> None:
    for fqn, param in model.named_parameters():
        wanted = plain.get_parameter(fqn).grad
        torch.testing.assert_close(
            param.grad.full_tensor(), wanted, **({"rtol": 0, "atol": 0} if exactly else {})
        )


def complex_steps(mode: str, options: dict[str, str] | None) -> None:
    rank = dist.get_rank()
    model = simple_fsdp(Turns(), init_device_mesh("cpu", (2,)), mode=mode)
    if options is not None:
        model.compile(backend="simplefsdp", options=options)
    model(batch(rank)).backward()
    plain = reference([batch(0), batch(1)])
    compare(model, plain)
    norm = clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    compare(model, plain, exactly=False)
    with unsharded(model):
        model.turn.data.mul_(1j)
    assert torch.equal(model.get_parameter("turn").detach().full_tensor(), plain.turn.detach() * 1j)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("fully_shard", None),
        ("replicate", None),
        ("fully_shard", {"executor": "aot_eager", "bucketing": "auto"}),
        ("fully_shard", {"executor": "aot_eager", "bucketing": "none"}),
    ],
)
def test_complex_parameters_have_the_gradients_of_one_process(pools, mode, options):
    pools(2).run(complex_steps, mode, options)


def accumulate_complex() -> None:
    rank = dist.get_rank()
    model = simple_fsdp(Turns(), init_device_mesh("cpu", (2,)), mp_policy=POLICY)
    for i in range(2):
        with microbatch(model, is_last=i == 1):
            model(batch(rank, i)).backward()
    compare(model, reference([batch(r, i) for r in range(2) for i in range(2)]), exactly=False)


def test_complex_gradients_are_accumulated_under_a_policy_of_real_dtypes(pools):
    pools(2).run(accumulate_complex)


class Sent(TorchDispatchMode):
    """Notes the dtypes that collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_a_backend_without_complex_numbers_is_sent_none(fake_mesh):
    """As NCCL: it refuses them."""
    model = simple_fsdp(Turns(), fake_mesh(2))
    with Sent() as sent, torch.autograd.set_multithreading_enabled(False):
        model(batch(0)).backward()
        with unsharded(model):
            pass
    assert len(sent.dtypes) > 6  # a gather and a reduce of each, and unsharded's
    assert not any(dtype.is_complex for dtype in sent.dtypes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_trainable_float8_parameter_is_refused_by_name_at_the_wrap(fake_mesh, dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(torch.zeros(3, 3).to(dtype))
    message = rf"1\.weight: is a trainable {dtype}: .*bfloat16.*requires_grad_\(False\)"
    with pytest.raises(ValueError, match=message):
        simple_fsdp(model, fake_mesh(2))
    assert not hasattr(model[0].weight, "placements")  # the model is as it was
