"""``benchmarks/published.py``: the program that others ran, beside the one that we would."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import published
import pytest

from simplefsdp.inspection.subject import trace_llama
from simplefsdp.models.options import ModelOptions


@pytest.mark.slow
def test_what_is_not_fused_takes_more(monkeypatch):
    def traced(*of, layers, **sizes):
        return trace_llama(*of, layers=2, **sizes)

    monkeypatch.setattr(published, "SEQ", 256)
    monkeypatch.setattr(published, "trace_llama", traced)
    monkeypatch.setattr(published, "ModelOptions", lambda name, mode: ModelOptions("debug", mode))
    published.ways_of.cache_clear()
    row = published.row_of(published.PUBLISHED[0])
    fused, apart, slow, both = row["predicted"].values()
    assert list(row["predicted"]) == [
        f"{kernels}, {memory}" for memory in published.CLUSTERS for kernels in ("fused", "unfused")
    ]
    assert fused["live_gib"] < apart["live_gib"] == both["live_gib"]
    assert slow["live_gib"] == fused["live_gib"]
    assert fused["tokens_per_s"] > apart["tokens_per_s"] and fused["step_ms"] < slow["step_ms"]
    assert fused["parts_ms"]["loops"] < apart["parts_ms"]["loops"] < both["parts_ms"]["loops"]
