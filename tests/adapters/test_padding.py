"""Which matmuls are padded follows from their sizes, not from what a rank's clock says."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch._inductor.fx_passes import pad_mm
from torch._subclasses.fake_tensor import FakeTensorMode

from simplefsdp._torch import Passes, compile_with_inductor, padding
from simplefsdp._torch.padding import padding_without_benchmarks

config = torch._inductor.config
mm = torch.ops.aten.mm


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Times that a benchmark on a GPU would take; popped from the front. There is a GPU."""
    times: list[float] = []
    monkeypatch.setattr(pad_mm, "check_device", lambda *tensors: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(pad_mm, "get_do_bench", lambda: lambda function: times.pop(0))
    monkeypatch.setattr(pad_mm, "get_cached_should_pad", lambda key: None)
    monkeypatch.setattr(pad_mm, "get_cached_base_mm_benchmark_time", lambda key: None)
    return times


def nothing(graph) -> None:
    pass


def graphs_of_step(width: int, tokens: int, grad: bool = True) -> list[str]:
    """What a linear layer and its backward, if any, become before they are lowered."""
    seen = []

    def observe(graph, is_backward):
        seen.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    def backend(gm, inputs):
        return compile_with_inductor(
            gm,
            inputs,
            Passes(before=nothing, joint=nothing, graph=None, scheduler=None, uuid=lambda: ""),
            observe=observe,
            lowering=FakeTensorMode,
            cudagraphs=False,
        )

    torch._dynamo.reset()
    weight = torch.randn(width, 512, requires_grad=grad)
    step = torch.compile(lambda x: (x @ weight.t()).sin().sum(), backend=backend, dynamic=False)
    loss = step(torch.randn(tokens, 512, requires_grad=grad))
    if grad:
        loss.backward()
    return seen


@pytest.mark.parametrize("grad", [True, False])
def test_the_graphs_do_not_depend_on_the_clock(clock, grad):
    graphs = []
    for times in ([1.0, 9.0], [9.0, 1.0]):  # of one rank, where padding is slow, and of another
        clock[:] = times * 8
        graphs.append(graphs_of_step(509, 1024, grad))
    assert graphs[0] == graphs[1]
    assert len(clock) == 16, "a matmul was timed"
    assert "constant_pad_nd" in graphs[0][0]


def should_pad(m, k, n, dtype=torch.bfloat16, transposed=(False, False)) -> bool:
    with FakeTensorMode(), padding_without_benchmarks():
        one, other = (
            torch.empty(*shape[::-1], dtype=dtype).t() if turn else torch.empty(*shape, dtype=dtype)
            for shape, turn in zip(((m, k), (k, n)), transposed, strict=True)
        )
        return pad_mm.should_pad(Match(), one, other, mm)


class Match:
    """Of the pattern; since 2.15 its output is looked at."""

    def output_node(self):
        return torch.fx.Graph().placeholder("x")


@pytest.mark.parametrize(
    ("sizes", "transposed", "expected"),
    [
        ((8192, 768, 50257), (False, True), True),  # logits
        ((8192, 50257, 768), (False, False), True),  # the gradient of what they are made of
        ((50257, 8192, 768), (True, False), True),  # and of the weight
        ((8192, 768, 50304), (False, True), False),  # aligned
        ((1023, 768, 768), (False, False), False),  # odd in number, but each row is aligned
        ((64, 768, 50257), (False, True), False),  # a copy of the weight costs more than it saves
        ((8192, 768, 3), (False, True), True),  # the weight is next to nothing
        ((8192, 50257, 64), (False, False), False),  # a copy of the logits is not
    ],
)
def test_the_rule(clock, sizes, transposed, expected):
    assert should_pad(*sizes, transposed=transposed) is expected


def test_four_bytes_are_aligned_by_fours(clock):
    assert not should_pad(4096, 4096, 4100, torch.float32)
    assert should_pad(4096, 4096, 4100, torch.bfloat16)


@pytest.mark.parametrize(
    ("setting", "sizes", "expected"),
    [
        ({"force_shape_pad": True}, (64, 768, 50257), True),
        ({"shape_padding": False}, (8192, 768, 50257), False),
        ({"deterministic": True}, (8192, 768, 50257), False),
    ],
)
def test_the_users_settings_stand(clock, setting, sizes, expected):
    with config.patch(setting):
        assert should_pad(*sizes) is expected


def test_a_setting_that_needs_a_clock_is_not_ignored_in_silence(clock, caplog):
    padding._say_not_used.cache_clear()
    with config.patch(post_grad_fusion_options={"shape_padding_multiplier": {"value": 3}}):
        assert should_pad(8192, 768, 50257) and should_pad(8192, 768, 50257)
    assert len(caplog.records) == 1
    assert "['shape_padding_multiplier']: not used" in caplog.text
    assert "force_shape_pad" in caplog.text
