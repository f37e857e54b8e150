"""Members packed into one buffer and out of it: by torch, and by one Triton kernel, which is
interpreted and compiled, for there may be no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.adapters import fx, packs
from inductor_passes.adapters.roofline import work_of

BF16, FP32 = torch.bfloat16, torch.float32


def checks(cache: Path, **environment: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "pack_checks.py"
    found = subprocess.run(
        [sys.executable, script],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), **environment},
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return checks(tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return checks(tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="")


def test_plain_packing():
    a, b = torch.arange(7.0), torch.arange(10.0, 14.0)
    flat = packs.PACK([a, b], 2, [4, 2], BF16)
    assert flat.dtype == BF16
    assert flat.tolist() == [0, 1, 2, 3, 10, 11, 4, 5, 6, 0, 12, 13]
    parts = packs.UNPACK(flat, 2, [4, 2])
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5, 6, 0], [10, 11, 12, 13]]
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    assert packs.PACK([halfway], 1, [3], BF16).tolist() == [1, 1 + 2**-6, -1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_know_the_operators(device: str):
    with FakeTensorMode():
        members = [torch.empty(7, device=device), torch.empty(4, 1, dtype=BF16, device=device)]
        flat = packs.PACK(members, 2, [4, 2], BF16)
        assert (flat.shape, flat.dtype, flat.device.type) == ((12,), BF16, device)
        parts = packs.UNPACK(flat, 2, [4, 2])
        assert [(part.shape, part.dtype) for part in parts] == [((8,), BF16), ((4,), BF16)]


def test_operators_keep_the_rules_of_operators():
    flat = torch.arange(12.0)
    for operator, args in (
        (packs.PACK, ([flat, flat], 2, [6, 7], BF16)),
        (packs.UNPACK, (flat, 2, [4, 2])),
    ):
        found = torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_what_they_cost_is_what_they_move():
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return packs.UNPACK(packs.PACK([a, b], 2, [400, 20], BF16), 2, [400, 20])

    graph = make_fx(function, tracing_mode="fake")(
        torch.ones(700), torch.ones(40, dtype=BF16)
    ).graph
    work = {op.split("_")[0]: w for op, w in work_of(fx.read(graph, lambda node: None)).items()}
    assert work["pack"].nbytes == 4 * 700 + 2 * 40 + 2 * 840
    assert work["unpack"].nbytes == 2 * 840 + 2 * 840
    assert [w.kernels for w in work.values()] == [1, 1]


@pytest.mark.slow
def test_the_kernel_gives_the_bits_of_its_twin(interpreted: dict[str, Any]):
    assert len(interpreted) == 14
    for case, found in interpreted.items():
        assert (found["packed"], found["unpacked"]) == (True, True), case


@pytest.mark.slow
def test_the_kernel_moves_each_byte_once(interpreted: dict[str, Any]):
    for case, found in interpreted.items():
        out = found["least"]["written"]
        assert found["pack"] == found["least"], case
        assert found["unpack"] == {"read": out, "written": out}, case


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernel_is_compiled(capability: str, compiled: dict[str, Any]):
    launches = {"empty": 0, "many": 4}  # of 64 members at most
    for case, found in compiled[capability].items():
        for kernels in found.values():
            assert len(kernels) == launches.get(case, 1), case
            assert all(kernel["binary"] > 0 for kernel in kernels), case


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_aligned_members_are_moved_16_bytes_at_a_time(capability: str, compiled: dict[str, Any]):
    found = compiled[capability]
    (kernel,) = found["aligned"]["pack"]
    loads = {"ld.global.v4.b32"}
    assert kernel["instructions"] == sorted({"cvt.rn.bf16x2.f32", "st.global.v4.b32", *loads})
    (kernel,) = found["aligned"]["unpack"]
    assert kernel["instructions"] == ["ld.global.v4.b32", "st.global.v4.b32"]
    (kernel,) = found["unaligned"]["pack"]
    assert loads.isdisjoint(kernel["instructions"])  # an address that is none would fault


@pytest.mark.slow
def test_buckets_of_many_sizes_share_a_variant(compiled: dict[str, Any]):
    of_both_ways = compiled["variants"]
    assert set(of_both_ways) == {"aligned", "unaligned", "of two dtypes", "more members"}
    assert all(found == [1, 1] for found in of_both_ways.values()), of_both_ways


@pytest.mark.slow
def test_triton_is_not_needed_where_there_is_no_gpu():
    script = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch, simplefsdp.compiler.backend
from inductor_passes.adapters import packs
assert packs.PACK([torch.ones(2)], 1, [2], torch.bfloat16).tolist() == [1, 1]
assert not packs.has_kernel(torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
