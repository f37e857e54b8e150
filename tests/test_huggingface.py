"""Models of transformers as they come, with their default configurations."""

from __future__ import annotations

import pytest
import torch

from simplefsdp import inspect, simple_fsdp

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("bucketing", ["auto", "manual"])
def test_a_model_that_makes_a_cache(fake_mesh, bucketing):
    """``use_cache=True``: the constants of the cache are inputs that move with the order."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    assert config.use_cache
    model = simple_fsdp(transformers.LlamaForCausalLM(config), fake_mesh(2))
    options = {"executor": "aot_eager", "bucketing": bucketing}
    model.compile(backend="simplefsdp", fullgraph=True, options=options)
    with inspect() as report:
        output = model(input_ids=torch.zeros(2, 16, dtype=torch.int64))
        output.logits.sum().backward()
    assert output.past_key_values is not None
    gathered = [fqn for bucket in report.graphs["forward"].buckets for fqn in bucket.fqns]
    assert sorted(gathered) == sorted(name for name, _ in model.named_parameters())
