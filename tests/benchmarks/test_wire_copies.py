"""What the modelled wire copies, and what holds up a GPU's streams, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import wire_copies
from transfers import Transfer, WireWork

SHAPES = [(3, 2), (5,), (1, 4)]


def shards() -> list[torch.Tensor]:
    return [torch.rand(shape) for shape in SHAPES]


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_gathers_of_all_members_at_once(rank: int, in_place: bool):
    sent = shards()
    outputs = [torch.full((4 * s.shape[0], *s.shape[1:]), -1.0) for s in sent]
    inputs = sent
    if in_place:
        inputs = [out.view(4, *s.shape)[rank] for out, s in zip(outputs, sent, strict=True)]
        for slot, shard in zip(inputs, sent, strict=True):
            slot.copy_(shard)
    wire_copies.gather(outputs, inputs, rank, 4)
    for found, shard in zip(outputs, sent, strict=True):
        assert torch.equal(found, torch.cat([shard] * 4))


def test_a_single_rank_has_nothing_to_copy():
    shard = torch.rand(3)
    wire_copies.gather([shard], [shard], 0, 1)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatters_of_all_members_at_once(factor: float, dtype: torch.dtype):
    full = [torch.rand(4, 3, 2).to(dtype), torch.rand(4, 5).to(dtype)]
    slots = [member[2] for member in full]
    one, other = ([torch.empty_like(slot) for slot in slots] for _ in range(2))
    wire_copies.reduce_scatter(one, full, 2, 4, factor)
    wire_copies.scatter_at_once(other, slots, factor)
    for a, b, slot in zip(one, other, slots, strict=True):
        assert torch.equal(a, b) and torch.equal(a, factor * slot)


class Stream:
    """A stream that notes what is queued on it."""

    def __init__(self, name: str) -> None:
        self.name, self.queued = name, list[str]()

    def __eq__(self, other: object) -> bool:  # as torch: objects of one stream are equal
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: object) -> None:
        self.queued.append("wait")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        stream.queued.append("event")


@pytest.mark.parametrize("captured", [False, True])
def test_a_stream_is_held_up_once_by_a_transfer_of_many_members(monkeypatch, captured: bool):
    main, side = Stream("main"), Stream("side")
    now, exposed = [main, main, side, main], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    transfer = Transfer("gather", 8, "0", 0.0, 1.0, 1.0)
    work = WireWork(transfer, [], [], object())  # type: ignore[arg-type]
    for stream in now:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        work.wait()
        exposed.append(transfer.events)
    held_up = ["wait"] if captured else ["event", "wait", "event"]
    assert main.queued == side.queued == held_up
    assert all(events is exposed[0] for events in exposed)  # those of the first wait
    assert (exposed[0] is None) == captured
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    WireWork(transfer, [], [], object()).wait()  # type: ignore[arg-type]
    assert main.queued == 2 * held_up  # another transfer's end is another
