"""Who is missing where a forward takes long."""

from __future__ import annotations

import logging
import time

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
    return [text for text in records if "has been in a forward" in text]


def waits(how: str, late: tuple[int, ...]) -> list[str]:
    """What each rank logs in a forward that some ranks begin late, and in one that all begin."""
    model = simple_fsdp(
        nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (dist.get_world_size(),))
    )
    call = (
        torch.compile(model, backend="simplefsdp", options=OPTIONS) if how == "compiled" else model
    )
    x = torch.ones(2, 4)
    call(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls, "_LONG_S", 0.1)
        patch.setattr(stalls, "_EVERY_S", 0.1)
        patch.setattr(stalls, "_watch", [])
        dist.barrier()
        if dist.get_rank() in late:
            time.sleep(2.0)
        first = logged(lambda: call(x))
        dist.barrier()

        def long() -> None:
            stalls.begin(range(dist.get_world_size()))
            time.sleep(1.5)
            stalls.end()

        return first + logged(long)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_forward_that_one_rank_does_not_begin(pools, how):
    (text,), others = pools(2).run(waits, how, (1,))
    assert "rank 0 has been in a forward for " in text and "and rank 1 is not in one" in text
    assert others == []


@pytest.mark.slow
def test_one_rank_tells_for_all(pools):
    first, (text,), *others = pools(4).run(waits, "compiled", (0, 2))
    assert "rank 1 has been in a forward" in text and "and ranks 0 and 2 are not in one" in text
    assert [first, *others] == [[], [], []]


def test_no_thread_for_one_rank():
    stalls.begin([0])
    assert not stalls._watch
