"""Work in several processes: its order, and what becomes of the others when one fails."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest

from simplefsdp.launcher.apart import processes, shared_out
from simplefsdp.launcher.errors import RunFailed


def _process_of(argument: int, there: Path) -> tuple[int, int]:
    """The argument, and who computes; the first waits until another process has begun."""
    if argument == 0:
        _wait_for(there)
    elif argument == 1:
        there.touch()
    return argument, os.getpid()


def _wait_for(there: Path) -> None:
    end = time.monotonic() + 60
    while not there.exists():
        assert time.monotonic() < end, "no other process began"
        time.sleep(0.01)


def _ends(argument: int, there: Path) -> int:
    if argument == 0:
        _wait_for(there)
        return argument
    there.touch()
    os._exit(9)


def _fails(argument: int, there: Path) -> None:
    if argument == 0:
        _wait_for(there)
        raise KeyError("the first fails")
    there.touch()
    time.sleep(600)


def test_results_are_in_order_and_each_is_told_once(tmp_path: Path):
    told: list[int] = []
    found = shared_out(partial(_process_of, there=tmp_path / "there"), range(6), 2, told.append)
    assert [argument for argument, _ in found] == [0, 1, 2, 3, 4, 5]
    assert found[0][1] == os.getpid() != found[1][1]
    assert sorted(told) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("count", "at_once"), [(3, 1), (1, 4), (0, 4)])
def test_one_process_needs_no_other(count, at_once):
    told: list[int] = []
    assert shared_out(lambda n: -n, range(count), at_once, told.append) == [0, -1, -2][:count]
    assert told == [0, 1, 2][:count]


def test_a_process_that_ends_is_an_error(tmp_path: Path):
    told: list[int] = []
    with pytest.raises(RunFailed, match="one of 2 processes ended without an answer"):
        shared_out(partial(_ends, there=tmp_path / "there"), range(2), 2, told.append)
    assert told == [0]


def test_if_one_fails_the_others_end_at_once(tmp_path: Path):
    before = set(active_children())
    with pytest.raises(KeyError, match="the first fails"):
        shared_out(partial(_fails, there=tmp_path / "there"), range(2), 2, lambda _: None)
    end = time.monotonic() + 60
    while set(active_children()) - before:
        assert time.monotonic() < end, "the other process goes on"
        time.sleep(0.01)


def test_an_error_of_another_process_arrives():
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"), processes(1) as pool:
        pool.submit(math.sqrt, -1.0).result()
