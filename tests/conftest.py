"""Fixtures: pools of real ranks, and a process group that stands for ranks that are not there."""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress

# Before torch is imported: Inductor writes and compiles loops without vectors in less time, and
# vectors are not ours.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
# Tests are of the CPU, also where there is a GPU: ranks would take one each, and a device that is
# faked is not beside a real one. test_on_device.py is of the GPU where it is told so.
if os.environ.get("SIMPLEFSDP_TEST_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# In a folder of its own: torch's key of generated code does not tell vectors, and a header without
# them does not compile what `simplefsdp train` has left.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/simplefsdp_tests_{os.getuid()}"
)
# Each process that imports Inductor would start another, for Triton alone, which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Dynamo formats a stack for each node; to find what to underline in it takes most of that time.
os.environ.setdefault("PYTHONNODEBUGRANGES", "1")

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, compile_as_tests_do
from torch._functorch import config as functorch_config
from torch._logging import _internal as internal
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Tests replace parts of ours, of which no key knows: code of an earlier one is not to run.
functorch_config.enable_autograd_cache = False


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws is the same in every run and in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logger_is_given_back() -> Iterator[None]:
    """A later test reads what is logged."""
    log = logging.getLogger("simplefsdp")

    def state() -> tuple[object, ...]:
        return log.level, log.propagate, log.disabled, list(log.handlers)

    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Pools of real gloo ranks by world size; only the last one used is kept alive."""
    running: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in running:
            for other in running.values():
                other.stop()
            running.clear()
            running[world_size] = RankPool(world_size)
        return running[world_size]

    yield pool_of
    for pool in running.values():
        pool.stop()


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Two gloo ranks for one module of tests, which leave them changed or out of step."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """``fake_mesh(4)`` or ``fake_mesh(2, 4, names=("dp", "tp"), rank=1)``: no communication."""

    def make(
        *shape: int, names: tuple[str, ...] | None = None, rank: int = 0, device: str = "cpu"
    ) -> DeviceMesh:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        _forget_meshes()
        world_size = int(torch.tensor(shape).prod())
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return init_device_mesh(device, shape, mesh_dim_names=names)

    torch._dynamo.reset()
    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """DTensor caches by mesh, and two fake meshes that differ only in this rank are equal to it.

    A machine with a GPU may lack numpy, which torch's module imports; ``test_on_device.py``, which
    runs there, has one fake mesh.
    """
    with suppress(ImportError):
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()


@pytest.fixture
def solo_mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with a real group: what is scattered arrives."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the collector, which compilers keep busy, need not walk it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    compile_as_tests_do()
    # Pytest gives its handlers to all loggers that do not propagate. To this one torch says the
    # text of each graph, if it has a handler.
    internal.trace_log.addHandler = lambda handler: None  # type: ignore[method-assign]


# What is frozen would be reported as leaked at exit, by triton 3.9's bindings. Not before: pytest
# collects garbage five times when it ends.
atexit.register(gc.unfreeze)


# Modules whose tests start ranks by a command, and tests that compile with Inductor here.
_COMMANDS = {"test_calibrate", "test_cli", "test_readme", "test_train"}
_RANKS = {"pools", "own_ranks"}
_INDUCTOR = {"test_compiled_order", "test_model_matrix", "test_pass_cache", "test_regions"}
# Modules whose fixture takes long: they come first, so that no other worker steals a part of them.
_TOGETHER = {"test_cuda_code", "test_elastic", "test_gpu_kit"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all tests, the slow ones, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By number of ranks, so that each pool starts once; the long ones first, so that none is left
    for the end when one of two workers has nothing to do.

    ``pytest -m "not ranks and not inductor"`` is for a quick answer.
    """
    if not any("::" in argument for argument in config.args):  # one that is named is run
        slow = _slow(items)
        if slow and not config.getoption("--slow"):
            config.hook.pytest_deselected(items=slow)
            left_out = set(slow)
            items[:] = [item for item in items if item not in left_out]
    for item in items:
        if _RANKS & set(getattr(item, "fixturenames", ())) or item.path.stem in _COMMANDS:
            item.add_marker(pytest.mark.ranks)
        if item.path.stem in _INDUCTOR:
            item.add_marker(pytest.mark.inductor)

    items.sort(key=lambda item: (item.path.stem in _TOGETHER, _ranks_of(item)), reverse=True)


def _slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that are marked as slow, without the cases that are quick all the same.

    Raises:
        pytest.UsageError: a mark names a case that there is not.
    """
    slow, missing = [], {}
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker is not None:
            case = getattr(getattr(item, "callspec", None), "id", "")
            quick = marker.kwargs.get("quick", ())
            missing.setdefault(item.nodeid.partition("[")[0], set(quick)).discard(case)
            slow += [] if case in quick else [item]
    if unknown := {test: cases for test, cases in missing.items() if cases}:
        raise pytest.UsageError(f"slow(quick=...) names cases that there are not: {unknown}")
    return slow


def _ranks_of(item: pytest.Item) -> int:
    """The number of ranks that a test asks for: its parameter, or what its source has."""
    names = set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    if callspec and "ranks" in callspec.params:
        return callspec.params["ranks"]
    if not names & _RANKS:
        return 0
    if "pools" not in names or "pool" in names:  # "pool": of a module's fixture, which stays
        return 2
    source = inspect.getsource(item.function)  # type: ignore[attr-defined]
    return max(map(int, re.findall(r"pools\((\d)\)", source)), default=2)
