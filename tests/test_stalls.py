"""Who is missing where a forward takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import simple_fsdp, stalls

OPTIONS = {"executor": "aot_eager", "bucketing": "none"}


def logged(call) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("simplefsdp").addHandler(handler)
    try:
        call()
    finally:
        logging.getLogger("simplefsdp").removeHandler(handler)
    return [text for text in records if "has been in a forward, or a whole step" in text]


@contextmanager
def soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls, "_LONG_S", 0.5)
        patch.setattr(stalls, "_EVERY_S", 0.1)
        patch.setattr(stalls, "_watch", [])
        dist.barrier()
        yield
        dist.barrier()


def waits(how: str, late: tuple[int, ...]) -> list[str]:
    """What each rank logs in a forward that some ranks begin late."""
    model = simple_fsdp(
        nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (dist.get_world_size(),))
    )
    compiled = torch.compile(model, backend="simplefsdp", options=OPTIONS)
    call = compiled if how == "compiled" else model
    x = torch.ones(2, 4)
    call(x)
    with soon():
        if dist.get_rank() in late:
            time.sleep(3.0)
        return logged(lambda: call(x))


def leave_signs(ranks: range) -> None:
    """Those that one look at three forwards leaves, by an earlier watch."""
    watch = stalls._Watch()
    watch.watched[0] = stalls.Watched(ranks, time.monotonic(), is_told=True)
    for _ in range(3):
        watch.look()


def goes_on_elsewhere(late: int) -> list[str]:
    """Of a forward that each rank is in, in which ranks look by turns: rank 1 begins ``late``
    looks after rank 0, and both have others inside of it, and in other threads."""
    ranks = range(dist.get_world_size())

    def looks(count: int) -> None:
        for rank in [*reversed(ranks)] * count:
            if rank == dist.get_rank():
                stalls._watch[0].look()
            dist.barrier()

    def forward() -> None:
        if dist.get_rank() == 1:
            looks(late)
        watched = stalls.begin(ranks, "cpu")
        if dist.get_rank() == 0:
            looks(late)
        for inside in (
            stalls.begin(ranks, "cpu"),
            ThreadPoolExecutor(1).submit(stalls.begin, ranks, "cpu").result(),
        ):
            looks(2)
            stalls.end(inside)
        looks(stalls._LOOKS + 1)
        stalls.end(watched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls, "_LONG_S", 0.0)
        patch.setattr(stalls._Watch, "is_alive", lambda watch: True)  # looks only when told
        leave_signs(ranks)
        patch.setattr(stalls, "_watch", [stalls._Watch()])
        return logged(forward)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_forward_that_one_rank_does_not_begin(pools, how):
    (text,), others = pools(2).run(waits, how, (1,))
    assert text.startswith("rank 0 has been in a forward, ") and "and rank 1 is not in one" in text
    assert others == []


@pytest.mark.slow
def test_one_rank_tells_for_all(pools):
    first, (text,), *others = pools(4).run(waits, "compiled", (0, 2))
    assert text.startswith("rank 1 has been") and "and ranks 0 and 2 are not in one" in text
    assert [first, *others] == [[], [], []]


def test_ranks_that_are_all_in_a_long_forward(pools):
    assert pools(2).run(goes_on_elsewhere, stalls._LOOKS - 1) == [[], []]
    (text,), others = pools(2).run(goes_on_elsewhere, stalls._LOOKS)
    assert text.startswith("rank 0 has been") and others == []


def test_what_is_not_watched():
    assert stalls.begin([0], "cpu") is None and stalls.begin([0, 1], "cuda") is None
