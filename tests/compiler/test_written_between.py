"""Parameters that are written to between a forward and its backward: right, or an error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import wrapped
from torch import Tensor, nn

from simplefsdp import microbatch

ERROR = r"^{}: written to between a forward and its backward"


def mlp(executor: str = "aot_eager", width: int = 8, **how) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
    return wrapped(model, options={"executor": executor}, **how)


def loss_of(model: nn.Module, x: Tensor | None = None) -> Tensor:
    return model(torch.ones(2, 8) if x is None else x).square().mean()


def write(*params: Tensor) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(2.0)


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


def _written(executor: str) -> None:
    model = mlp(executor)
    loss = loss_of(model)
    write(*model.parameters())
    with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
        loss.backward()
    # The weight of the first layer is not needed: x wants no gradient. Nothing is left behind.
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    "executor",
    ["aot_eager", *(pytest.param(n, marks=pytest.mark.slow) for n in ("inductor", "regions"))],
)
def test_a_backward_that_gathers_other_values_raises(pools, executor):
    pools(2).run(partial(_written, executor))


def _steps_in_turn() -> None:
    """As of two losses with a step between them; then in the right order."""
    model = mlp("aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model, torch.zeros(2, 8))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
        second.backward()
    for x in (torch.ones(2, 8), torch.zeros(2, 8)):
        loss_of(model, x).backward()
        optimizer.step()


def test_a_step_between_two_losses(pools):
    pools(2).run(_steps_in_turn)


def _not_needed(reshard: bool, ready: bool) -> None:
    """Biases are not needed; and no weight is, where the full one is kept, of uneven rows, too."""
    model, same = (mlp(width=7, reshard_after_forward=reshard) for _ in range(2))
    loss_of(same).backward()
    loss = loss_of(model)
    write(model[0].bias, model[2].bias, *([] if reshard else model.parameters()))
    if ready:  # a forward after the write is nobody's concern
        behind = loss_of(model)
    loss.backward()
    for ours, wanted in zip(gradients(model), gradients(same), strict=True):
        assert torch.equal(ours, wanted)
    if ready:
        behind.backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_what_backward_does_not_need_may_be_written_to(pools, reshard, ready):
    pools(2).run(partial(_not_needed, reshard, ready))


def _accumulated() -> None:
    model = mlp("aot_eager")
    with microbatch(model, is_last=False):
        loss = loss_of(model)
        write(model[2].weight)
        with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
            loss.backward()


def test_while_gradients_accumulate(pools):
    pools(2).run(_accumulated)


class _Block(nn.Linear):
    """Beside its result it gives a view of its input, which another block has made."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(super().forward(x)), x.view(-1)


def _stepped_in_backward() -> None:
    """Each block is a graph; a parameter is stepped when its gradient is there."""
    blocks = [wrapped(_Block(8, 8), options={"executor": "aot_eager"}) for _ in range(3)]
    for param in (param for block in blocks for param in block.parameters()):
        param.register_post_accumulate_grad_hook(write)
    x, seen = torch.ones(2, 8), []
    for block in blocks:
        x, view = block(x)
        seen.append(view.sum())
    (x.sum() + sum(seen[1:])).backward()
    assert all(param.grad is not None for block in blocks for param in block.parameters())


def test_a_view_of_an_input_belongs_to_the_graph_that_made_it(pools):
    pools(2).run(_stepped_in_backward)


def _teacher(student_first: bool) -> None:
    student, teacher = (mlp() for _ in range(2))
    teacher.requires_grad_(False)
    for model in (student, teacher):
        model._compiled_call_impl = None

    def both(x: Tensor) -> Tensor:
        if student_first:
            return (student(x) - teacher(x)).square().mean()
        return (teacher(x) - student(x)).square().mean()

    loss = torch.compile(both, backend="simplefsdp", options={"executor": "aot_eager"})(
        torch.ones(2, 8)
    )
    write(*teacher.parameters())
    loss.backward()


@pytest.mark.parametrize("student_first", [True, False])
def test_a_teacher_of_the_same_names_may_be_written_to(pools, student_first):
    pools(2).run(partial(_teacher, student_first))


def _second_of_equal_models() -> None:
    """The second runs the first one's code; the error names its own parameter."""
    layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
    wrapped(layers, options=None)
    x = torch.ones(2, 8, requires_grad=True)
    for layer in layers:
        layer.compile(backend="simplefsdp", options={"executor": "aot_eager"})
        x = layer(x)
    write(layers[1][1].weight)
    with pytest.raises(RuntimeError, match=ERROR.format(r"1\.1\.weight")):
        x.sum().backward()


def test_the_error_names_the_parameter_of_the_call(pools):
    pools(2).run(_second_of_equal_models)


def _compiled_backward() -> None:
    from torch._dynamo import compiled_autograd

    model, same = mlp(), mlp()
    loss = loss_of(model)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    loss_of(same).backward()
    for ours, wanted in zip(gradients(model), gradients(same), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="of the newest torch only")
def test_compiled_autograd(pools):
    pools(2).run(_compiled_backward)
