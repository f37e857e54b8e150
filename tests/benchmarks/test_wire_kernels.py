"""The modelled wire on a GPU, without one: its kernels are compiled, its streams are told apart."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cluster_here
from rows import Row
from transfers import link
from wire_lane import Kernels, Lane

from inductor_passes.machine.presets import preset


def test_the_kernels_are_accepted_for_an_h100(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from wire_kernels import WARPS, sources

    reads = {}
    for kernel, signature, constants in sources():
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        target = GPUTarget("cuda", 90, 32)
        made = triton.compile(source, target=target, options={"num_warps": WARPS})
        assert made.asm["cubin"]
        reads[kernel.__name__] = made.asm["ptx"].count("%globaltimer")
    # The clock is read again in the loop: it is not taken for a constant.
    assert reads == {"stamp": 1, "hold": 2}


class Streams:
    """CUDA's streams, as a list of what is queued on each and waits for which."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.made = [], "main", iter(("wire", "copies"))
        self.priorities = []
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self.Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    def make(self, priority=0):
        self.priorities.append(priority)
        return self.Stream(self, next(self.made))

    class Stream:
        def __init__(self, all_of_them, name):
            self.log, self.name = all_of_them.log, name

        def wait_stream(self, other):
            self.log.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, all_of_them):
            self.log = all_of_them.log

        def record(self, stream):
            self.log.append(f"done on {stream.name}")

    @contextlib.contextmanager
    def use(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def run(self, what):
        self.log.append(f"{what} on {self.current}")


def test_copies_run_beside_the_time_that_a_transfer_takes(monkeypatch):
    streams = Streams(monkeypatch)
    kernels = Kernels(
        lambda began: streams.run("stamp"),
        lambda began, ns, blocks: streams.run(f"{blocks} blocks for {ns} ns"),
    )
    lane = Lane(torch.device("cpu"), kernels)
    assert streams.priorities == [-1, -1]  # as FSDP2 gathers
    lane.transfer(lambda: streams.run("copies"), 2e-3, 24)
    assert streams.log == [
        "wire waits for main",  # for what is sent
        "stamp on wire",
        "copies waits for wire",  # which is behind the transfer before
        "24 blocks for 2000000 ns on wire",
        "copies on copies",
        "wire waits for copies",
        "done on wire",
    ]


def test_the_planner_is_told_how_many_multiprocessors_a_transfer_takes(monkeypatch):
    h100 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    kept = ("peaks", "memory_gb_s", "memory_fraction", "launch_us", "memory_gb")
    known = {key: getattr(preset("h100"), key) for key in kept}
    monkeypatch.setattr(cluster_here, "_computes", known)
    monkeypatch.setattr(link, "bandwidth", 4e11)
    found = {}
    for blocks in (1, 24):
        monkeypatch.setattr(link, "blocks", blocks)
        for device in ("cpu", "cuda"):
            found[device, blocks] = cluster_here.cluster_here(Row(), torch.device(device))
    beside = {key: cluster.compute_beside for key, cluster in found.items()}
    assert beside["cpu", 1] == beside["cpu", 24] == 1
    assert beside["cuda", 1] == 1 - 1 / 132 and beside["cuda", 24] == 1 - 24 / 132
