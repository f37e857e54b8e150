"""How calibration times a GPU, told by a device whose clock the test turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from inductor_passes.machine.links import Link
from simplefsdp import _torch
from simplefsdp.calibrate import collectives, measure, timers
from simplefsdp.calibrate.fit import Sample, with_members
from simplefsdp.calibrate.measure import sweep_for
from simplefsdp.calibrate.timers import Timer, host_clock, medians_us, timer_for
from simplefsdp.models.build import plain_model
from simplefsdp.models.configs import CONFIGS, layer_numels
from simplefsdp.models.options import ModelOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Device:
    """A stream whose clock moves on by what is launched."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.log: list[str] = []

    def kernel(self, name: str, us: float) -> Callable[[], None]:
        def run() -> None:
            self.now_us += us
            self.log.append(name)

        return run

    def timer(self, queued: int = 20) -> Timer:
        return Timer(queued, self._mark, lambda a, b: b - a, lambda: self.log.append("hold"))

    def _mark(self) -> float:
        self.log.append("mark")
        return self.now_us


def test_calls_are_queued_up_between_two_marks() -> None:
    device = Device()
    found = medians_us({"mm": device.kernel("mm", 7.0)}, 2, device.timer())
    assert found == {"mm": 7.0}
    turn = ["hold", "mark", *["mm"] * 20, "mark"]
    first = ["mm", "mark", "mm", "mark"]  # to warm up, and to see how long it takes
    assert device.log == first + turn * 2


def test_what_takes_long_is_queued_up_less_unless_others_take_part() -> None:
    device = Device()
    calls = {"slow": device.kernel("slow", 9e3), "endless": device.kernel("endless", 1e6)}
    assert medians_us(calls, 1, device.timer()) == {"slow": 9e3, "endless": 1e6}
    assert [device.log.count(name) for name in calls] == [2 + 2, 2 + 1]
    device = Device()
    calls = {"gather": device.kernel("gather", 9e3)}
    assert medians_us(calls, 1, device.timer(), together=True) == {"gather": 9e3}
    assert device.log == ["gather", "hold", "mark", *["gather"] * 20, "mark"]


def test_on_cpu_each_call_is_timed_by_itself() -> None:
    assert (timer_for(CPU).queued, host_clock(CPU).queued) == (1, 1)
    calls = []
    found = medians_us({"mm": lambda: calls.append(0)}, 3, timer_for(CPU))
    assert len(calls) == 1 + 3 and found["mm"] >= 0


class FakeEvent:
    """An event of a stream that counts what is recorded."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.waited = -1, False

    def record(self, stream: object) -> None:
        assert stream == "current stream"
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.waited and not self.waited
        return 3.0 * (end.at - self.at)  # milliseconds


def test_on_cuda_calls_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current stream")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    timer = timer_for(CUDA)
    assert timer.queued == 20
    assert timer.us(lambda: None, 20) == 3000 / 20


def test_hold_up_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract: there is such a kernel, and it is told a number of cycles."""
    assert "cycles" in torch.cuda._sleep.__code__.co_varnames[:1], "torch.cuda._sleep moved"
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    _torch.hold_up_stream()
    assert held and held[0] > 10**6


def test_on_cuda_it_is_what_training_runs() -> None:
    cuda = sweep_for("cuda", quick=False, nbytes_max=None)
    assert cuda.heads == (32, 128)
    quick = sweep_for("cuda", quick=True, nbytes_max=None)
    for sweep in (cuda, quick):
        assert (sweep.beside_dtype, sweep.beside_width) == (torch.bfloat16, 4096)
        assert max(sweep.widths) >= 4096
    cpu = sweep_for("cpu", quick=False, nbytes_max=None)
    assert (cpu.heads, cpu.beside_dtype, cpu.beside_width) == ((8, 64), torch.float32, 0)


def test_wide_matmuls_in_bf16_run_beside_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(
        collectives, "matmuls", lambda dtype, width, device: made.append((dtype, width))
    )
    assert list(
        collectives.layers_beside(sweep_for("cuda", quick=False, nbytes_max=None), CPU)
    ) == [
        4096,
        8192,
    ]
    assert made == [(torch.bfloat16, 4096), (torch.bfloat16, 8192)]
    assert list(collectives.layers_beside(sweep_for("cpu", quick=True, nbytes_max=None), CPU)) == [
        64,
        256,
    ]


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is multiplied."""
    found: list[torch.Tensor] = []
    mm = torch.mm

    def seen(x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found.extend((x, y))
        return mm(x, y, **kwargs)

    monkeypatch.setattr(torch, "mm", seen)
    return found


def test_operands_are_random(operands: list[torch.Tensor]) -> None:
    measure.matmuls(torch.float32, 16, CPU)()
    assert len(operands) == 6
    for tensor in operands:
        assert len(tensor.unique()) > 200


def test_what_needs_too_much_memory_is_left_out() -> None:
    def refuses() -> None:
        raise torch.OutOfMemoryError("no room for all scores")

    calls = {1.0: lambda: None, 2.0: refuses, 3.0: lambda: None}
    assert list(measure._affordable(calls, timer_for(CPU))) == [1.0]


def test_what_a_member_of_a_bucket_costs() -> None:
    link = Link(30.0, 400.0)
    flat = [Sample(float(n), link.us(n, 8)) for n in (2**16, 2**20, 2**24)]

    def member_us(more_us: Callable[[int], float], members: Sequence[int]) -> float:
        several = [
            Sample(s.size, s.us + more_us(m - 1), m) for s, m in zip(flat, members, strict=True)
        ]
        return with_members(link, [*flat, *several]).member_us

    assert member_us(lambda further: further * 4.0, (8, 8, 8)) == pytest.approx(4.0)
    assert member_us(lambda further: further * 4.0, (9, 18, 2)) == pytest.approx(4.0)
    assert member_us(lambda further: 1e6 if further == 1 else further * 4.0, (2, 8, 9)) == (
        pytest.approx(4.0)
    )
    assert member_us(lambda further: -1.0, (8, 8, 8)) == 0
    assert member_us(lambda further: 1e4, (8, 8, 8)) == 30
    assert with_members(link, flat) == link


def test_a_bucket_has_large_and_small_members() -> None:
    assert collectives.halved(256) == [128, 64, 32, 16, 8, 4, 2, 2]
    for numel in (256, 1000, 12345):
        parts = collectives.halved(numel)
        assert sum(parts) == numel and len(parts) == collectives.MEMBERS and min(parts) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_of_a_layer(name: str) -> None:
    layer = plain_model(ModelOptions(name), layers=1).layers[0]
    assert layer_numels(CONFIGS[name]) == [p.numel() for p in layer.parameters()]


def test_buckets_are_layers_of_the_model() -> None:
    layer = [2 * numel for numel in layer_numels(CONFIGS["8b"])]
    sweep = sweep_for("cuda", quick=False, nbytes_max=None, layer_nbytes=layer)
    one, two = collectives.buckets(sweep, 64)
    assert [4 * 64 * numel for numel in one] == layer and two == one * 2
    small = sweep_for("cpu", quick=False, nbytes_max=None, layer_nbytes=layer)
    one, two = collectives.buckets(small, 64)
    assert 0.99 * 2**24 < 4 * 64 * sum(two) <= 2**24
    assert one[1] / one[-1] == pytest.approx(layer[1] / layer[-1], rel=0.01)


def timed(layer_nbytes: Sequence[int]) -> dict[str, list[tuple[float, int]]]:
    sweep = measure.Sweep((1024, 8192), (), (), 0, 1, layer_nbytes=layer_nbytes)
    found = collectives.time_collectives(2, sweep, CPU)
    return {kind: [(s.size, s.members) for s in samples] for kind, samples in found.items()}


def test_a_layers_buckets_are_timed_as_one_buffer_and_as_its_tensors(pools) -> None:
    expected = [(1024, 1), (8192, 1), (4976, 1), (9952, 1), (4976, 3), (9952, 6)]
    for found in pools(2).run(timed, (4096, 80, 800)):
        assert found == dict.fromkeys(("gather", "reduce", "all_reduce"), expected)


def test_buckets_are_timed_as_one_buffer_and_as_several(pools) -> None:
    expected = [(1024, 1), (8192, 1), (8192, 8)]
    for found in pools(2).run(timed, ()):
        assert found == dict.fromkeys(("gather", "reduce", "all_reduce"), expected)


def test_the_host_waits_for_the_device_where_launches_are_timed(monkeypatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert timers.host_clock(CUDA).us(lambda: None) >= 0
    assert waited == [CUDA, CUDA]


def test_all_sizes_are_measured_until_one_takes_too_long():
    times = iter([1.0, 2.0, 3.0, 9e5])
    timer = Timer(1, lambda: None, lambda begin, end: next(times))
    calls = {float(size): lambda: None for size in range(1, 7)}
    assert list(measure._affordable(calls, timer)) == [1, 2, 3, 4, 5]
