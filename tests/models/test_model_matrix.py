"""Real architectures against one process, on two ranks: eleven of ``benchmarks/models.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

TOLERANCE = 1e-5
# On 2.11 transformers computes attention otherwise where it is compiled, by any backend, ours or
# not: with a mask, and keys and values repeated for grouped queries. In bf16 that is a rounding.
COMPILED_BF16 = 2**-6 if torch.__version__ < "2.12" else TOLERANCE
LIBRARIES = {"lora_bf16": "peft", "lstm": "torch"}  # the rest: transformers
# Something of each kind, the quick ones to compile: tied and shared layers, graph breaks, experts,
# a state space, running statistics that differ by rank, masks drawn by numpy, frozen bf16.
MODELS = {
    "gemma3": "auto",
    "gpt2": "manual",
    "mixtral": "manual",
    "mamba2": "manual",
    "albert": "manual",
    "modernbert": "auto",
    "t5": "manual",
    "resnet": "manual",
    "wav2vec2": "manual",
    "lora_bf16": "auto",
    "lstm": "auto",
}


BROKEN = ("gpt2", "wav2vec2")  # by a logger call in the loss; by lengths that depend on data


def compare(name: str, bucketing: str) -> dict:
    import models_rank
    from models_media import classified, hugging_face

    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "embedding_size": 8}
    two_stages = hugging_face("ResNetForImageClassification", classified, base={}, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models_rank.MODELS, "resnet", two_stages)  # of four: it is compiled in time
        patch.setattr(models_rank, "rounding", lambda *_: None)  # which the test does not ask for
        return models_rank.compare(name, bucketing, "aot_eager")


@pytest.mark.slow(quick=["lstm"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process_does(pools, name):
    library = LIBRARIES.get(name, "transformers")
    pytest.importorskip(library, reason=f"{name} is a model of {library}")
    tolerance = COMPILED_BF16 if name == "lora_bf16" else TOLERANCE
    for found in pools(2).run(compare, name, MODELS[name]):
        assert "error" not in found, found["trace"]
        # Op by op as in one process, so that bf16 is as close as fp32.
        assert found["gradient"] < tolerance, found["gradient_of"]
        assert found["loss"] < tolerance
        assert found["absent_differs"] == []
        assert bool(found["breaks"]) or name not in BROKEN
        for kind in ("gather", "reduce"):
            assert found["buckets"][kind] < found["collectives"][kind], kind


def steps(**gradients: float | None) -> list:
    import models_rank

    tensors = {
        name: None if value is None else torch.full((2,), value)
        for name, value in gradients.items()
    }
    return [models_rank.Step(2.0, tensors)]


def test_a_difference_is_found_and_named():
    from models_rank import difference

    same = difference(steps(a=1.0, b=3.0), steps(a=1.0, b=3.0))
    assert (same["gradient"], same["loss"], same["absent_differs"]) == (0.0, 0.0, [])
    apart = difference(steps(a=1.5, b=3.0), steps(a=1.0, b=3.0))
    assert apart["gradient"] == pytest.approx(0.5) and apart["gradient_of"] == "a"
    # What is zero but for rounding is measured against the largest gradient.
    noise = difference(steps(a=2e-9, b=1.0), steps(a=1e-9, b=1.0))
    assert noise["gradient"] == pytest.approx(1e-6, rel=1e-3)
    broken = difference(steps(a=float("nan"), b=1.0), steps(a=1.0, b=1.0))
    assert broken["gradient"] == float("inf") and broken["gradient_of"] == "a"
    one_sided = difference(steps(a=None, b=1.0), steps(a=1.0, b=1.0))
    assert one_sided["absent_differs"] == ["a"]
    other_side = difference(steps(a=1.0, z=0.0, b=1.0), steps(a=None, z=None, b=1.0))
    assert (other_side["absent_differs"], other_side["zero_for_absent"]) == (["a"], ["z"])


def test_a_verdict_allows_what_rounding_makes_of_the_reference():
    from models_table import trains

    cell = {"gradient": 1e-3, "loss": 0.0, "absent_differs": [], "rounding": 2e-6}
    assert not trains(cell, TOLERANCE)
    assert trains({**cell, "rounding": 1e-2}, TOLERANCE)
    assert trains({**cell, "gradient": 1e-6, "rounding": None}, TOLERANCE)
    assert not trains({**cell, "gradient": 0.0, "absent_differs": ["a"]}, TOLERANCE)
    assert not trains({"error": "ValueError: no"}, TOLERANCE)
