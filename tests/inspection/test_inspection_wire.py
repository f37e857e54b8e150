"""The modelled wire of the benchmarks under torch's profiler: what it tells is found again."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from simplefsdp.inspection.measured import measure
from simplefsdp.inspection.profile import read_profiles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# In a process of its own: the wire takes over a functional collective of the whole process.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, transfers, wire
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import simplefsdp

wire.connect(4)
wire.set_link(1e-4, 1e9)
blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)]
model = simplefsdp.simple_fsdp(nn.Sequential(*blocks), init_device_mesh("cpu", (4,)))
model.compile(backend="simplefsdp", options={"bucketing": "manual", "executor": "aot_eager"})
x = torch.ones(64, 128)

def step():
    model(x).sum().backward()

with simplefsdp.inspect() as report:
    step()
found = report.measure(step, steps=2)
with torch.profiler.profile() as profiler:
    transfers.link.take()
    step()
    sent = transfers.link.take()
profiler.export_chrome_trace("trace.json")
told = [(t.kind, t.nbytes, t.modelled_s * 1e6, t.done_s * 1e6) for t in sent]
print(json.dumps({**found.to_json(), "sent": told}))
"""


@pytest.mark.slow
def test_transfers_of_the_wire_are_measured(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCHMARKS)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert (found["match_rate"], found["unmatched"]) == (1.0, 0)
    for bucket in found["buckets"]:
        assert bucket["measured_us"] == pytest.approx(100 + bucket["bytes"] / 1e3, abs=0.01)
        assert 0 <= bucket["measured_exposed_us"] <= bucket["measured_us"]
    (profile,) = read_profiles(tmp_path / "trace.json")
    told = [(t.kind, t.nbytes) for t in profile.transfers]
    assert told == [(kind, nbytes) for kind, nbytes, *_ in found["sent"]]
    for transfer, (_, _, modelled_us, *_) in zip(profile.transfers, found["sent"], strict=True):
        assert transfer.end_us - transfer.begin_us == pytest.approx(modelled_us, abs=0.01)
    # The profiler's clock has another zero; a rank that is held up launches late in one of them.
    ends = zip(profile.transfers, found["sent"], strict=True)
    zeros = [transfer.end_us - done_us for transfer, (*_, done_us) in ends]
    middle = statistics.median(zeros)
    assert statistics.median(abs(zero - middle) for zero in zeros) < 500
    assert measure(profile).exposed_us > 0
