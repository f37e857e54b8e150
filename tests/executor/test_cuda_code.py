"""The CUDA code of a wrapped Llama, which Inductor writes for a GPU that is not there.

The cases are compiled in a process beside this one, see ``cuda/cases.py``. Nothing runs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generated_cuda import collectives, events, kernels, padded

HERE = Path(__file__).parents[1] / "cuda"
pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(shutil.which("g++") is None, reason="builds a device guard"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton writes kernels"),
]
LAYERS = 2
PARAMETERS, MATRICES = 9 * LAYERS + 3, 7 * LAYERS + 1  # but the embedding, which is looked up


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What ``cuda/cases.py`` says of a case; of nothing did Triton refuse to make a cubin."""
    folder = tmp_path_factory.mktemp("cuda")
    path = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    words = (folder / "stderr.txt").open("w")
    server = subprocess.Popen(
        [sys.executable, str(HERE / "cases.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        text=True,
        env=env,
    )
    assert server.stdin is not None and server.stdout is not None
    pipes = server.stdin, server.stdout

    @functools.cache
    def ask(name: str) -> dict[str, Any]:
        out = folder / f"{name}.json"
        print(name, out, file=pipes[0], flush=True)
        said = pipes[1].readline().strip()
        if said != "done":
            why = json.loads(said) if said else (folder / "stderr.txt").read_text()[-4000:]
            raise AssertionError(why)
        found: dict[str, Any] = json.loads(out.read_text())
        assert len(found["kernels"]) > 10
        assert not found["refused"]
        return found

    yield ask
    server.kill()
    server.communicate()
    words.close()


def launches(sequence: list[str]) -> list[str]:
    return [event for event in sequence if " of " in event]


def hidden(sequence: list[str]) -> list[tuple[str, int, set[int]]]:
    """Of each launch: what it is, how many computes run before it, and before its waits. Of how
    many tensors it is, is not planned: small members share one."""
    found: list[tuple[str, int, set[int]]] = []
    computes = 0
    for event in sequence:
        if " of " in event:
            found.append((event.split()[0], computes, set()))
        elif event.startswith("wait"):
            found[int(event.split()[-1])][2].add(computes)
        else:
            computes += 1
    return found


def parts(found: dict[str, Any]) -> list[tuple[list[str], str]]:
    """Of forward and backward, the plan and the code."""
    return list(zip(found["planned"].values(), found["codes"], strict=True))


def of_gathers(sequence: list[str]) -> int:
    """How many parameters are gathered."""
    return sum(int(event.split()[-1]) for event in launches(sequence) if "gather" in event)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "hybrid", "uneven", "flex"])
def test_what_was_planned_is_what_runs(name, compiled):
    for planned, code in parts(compiled(name)):
        assert len(launches(planned)) >= 3 and planned.count("product") > 14
        assert hidden(events(code)) == hidden(planned)
        assert padded(code) == []


def test_what_a_collective_sends_is_known_or_refused():
    launch = "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"
    lines = [
        "assert_size_stride(primals_1, (7, 3), (4, 1))",
        "assert_size_stride_grouped((primals_2, primals_3), ((4, ), (2, 3)), ((1, ), (3, 1)))",
        "buf0 = torch.ops.inductor_passes.pack.default([primals_3], 1, [6], torch.bfloat16)",
        "buf1 = empty_strided_cuda((2, 3), (8, 1), torch.float32)",
        "buf2 = buf1; del buf1  # reuse",
        f"buf3 = {launch}([primals_1, primals_2, reinterpret_tensor(primals_3, (2, ), (2, ), 0), "
        "reinterpret_tensor(buf0, (3, 2), (2, 1), 0), buf2], 2, '0')",
    ]
    code = "\n".join(["def call(self, args):", *lines])
    assert padded(code) == ["primals_1", "primals_3", "buf2"]
    with pytest.raises(ValueError, match="how buf4 lies is not known"):
        padded(f"{code}\nbuf5 = {launch}([buf4], 2, '0')")


@pytest.mark.slow
def test_tensor_parallel(compiled):
    for planned, code in parts(compiled("tensor_parallel")):
        assert any("all_reduce of 1" in event for event in planned)
        assert hidden(events(code)) == hidden(planned)
        assert padded(code) == []


@pytest.mark.slow
def test_manual(compiled):
    """Its windows are relative to what is computed, which Inductor orders."""
    for planned, code in parts(compiled("manual")):
        generated = events(code)
        assert len(launches(planned)) < PARAMETERS
        assert launches(generated) == launches(planned)
        assert Counter(generated) == Counter(planned)
        exposed = [sum(start == min(waits) for _, start, waits in hidden(generated[:-1]) if waits)]
        assert exposed[0] <= 2  # the first gather, and the last reduce if it is waited for here
        assert padded(code) == []


@pytest.mark.slow
def test_without_passes_nothing_is_moved(compiled):
    for planned, code in parts(compiled("none")):
        assert of_gathers(planned) >= PARAMETERS - 1 and len(launches(planned)) >= PARAMETERS - 1
        assert events(code) == planned
        assert padded(code) == []


@pytest.mark.slow
def test_kernels(compiled):
    """One casts the shards of a bucket, none the gradients of matrices; all else is fused."""
    cast = re.compile(r"triton_poi_fused__to_copy(_view|_all_gather_into_tensor)*_\d+$")
    counts = []
    for planned, code in parts(compiled("auto")):
        launched = Counter(bool(cast.match(name)) for name in kernels(code))
        buckets = Counter(event.split()[0] for event in launches(planned))
        packs = code.count("torch.ops.inductor_passes.pack.default(")
        packed_grads = len(re.findall(r"pack\.default\(\[[^]]*buf", code))
        assert packs - packed_grads <= buckets["gather"] and packed_grads <= buckets["reduce"]
        assert launched[True] + packs - packed_grads == buckets["gather"]
        assert code.count("torch.ops.inductor_passes.unpack.default(") <= buckets["gather"]
        counts.append(launched[False])
    assert len(re.findall(r"mm_dtype\(|aten\.mm\.dtype", code)) == MATRICES  # of backward
    loops, loops_back = counts
    assert loops <= 3 + 6 * LAYERS and loops_back <= 6 + 12 * LAYERS


# Of forward and backward on 2.15, two layers; another release may make a few more.
LAUNCHED = {
    "none": (36, 47),  # shards are cast one by one
    "manual": (16, 28),
    "auto": (15, 27),
    "hybrid": (15, 38),  # activations are computed again
    "uneven": (22, 61),  # and rows are padded
    "tensor_parallel": (16, 29),
    "cudagraphs": (15, 27),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_as_few_kernels_are_launched_as_before(name, compiled):
    found = tuple(len(kernels(code)) for _, code in parts(compiled(name)))
    assert all(n <= most + LAYERS for n, most in zip(found, LAUNCHED[name], strict=True)), found


@pytest.mark.slow
def test_each_graph_is_captured_whole(compiled):
    """In one CUDA graph; what is copied to it is the batch and the gradient of the loss."""
    found = compiled("cudagraphs")
    for planned, code in parts(found):
        assert re.findall(r"def (partition_\d+)", code) == ["partition_0"]
        assert hidden(events(code)) == hidden(planned)
    # Before 2.15 torch takes the batch, which backward needs, for what stays where it is.
    assert found["copied"] in ([1, 1], [1, 2])


@pytest.mark.slow
def test_regions_launch_nearly_as_few_kernels(compiled):
    """Those of regions that are alike counted once: 42 where the graph is compiled whole."""
    of_regions = [len(kernels(code)) for code in compiled("regions")["codes"]]
    # A piece of a layer more for each place where the plan has something stand in any of them.
    assert 10 < len(of_regions) <= 20 + LAYERS and sum(of_regions) <= 50 + LAYERS, of_regions


@pytest.mark.slow
def test_regions_hold_no_collective(compiled):
    found = compiled("regions")
    assert len(found["codes"]) > 2 and not any(
        "torch.ops._c10d_functional" in code for code in found["codes"]
    )
    for planned, program in zip(found["planned"].values(), found["programs"], strict=True):
        of_collectives = [event for event in planned if " " in event]
        assert hidden(collectives(program)) == hidden(of_collectives)
