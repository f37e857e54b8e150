"""Models of transformers as they come, with their default configurations except for size."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from parity import global_loss, local, relative_error
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import inspect, simple_fsdp

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def tokens(generator):
    return torch.randint(60, (4, 16), generator=generator)


def llava(generator):
    """Checks of the data; images that cross from graph to graph as views of one tensor."""
    vision = {**TEXT, "image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
    del vision["vocab_size"]
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=63,
    )
    x = tokens(generator)
    pixels = torch.randn(4, 3, 28, 28, generator=generator)
    labels = x.clone()
    x[:, 1:5] = 63
    inputs = {"input_ids": x, "pixel_values": pixels, "labels": labels}
    return transformers.LlavaForConditionalGeneration(config), inputs


@pytest.mark.slow
@pytest.mark.parametrize("bucketing", ["auto", "manual"])
def test_a_model_that_makes_a_cache(fake_mesh, bucketing):
    """``use_cache=True``: the constants of the cache are inputs that move with the order."""
    config = transformers.LlamaConfig(**TEXT)
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


def train_and_compare(build, options):
    """One step beside one process on the whole batch; gives the gathers of each graph."""
    torch.manual_seed(1)
    plain, batch = build(torch.Generator().manual_seed(0))
    # In fp64: many of their gradients are small differences of large terms, or 0 but for those.
    plain = plain.double()
    batch = {name: v.double() if v.is_floating_point() else v for name, v in batch.items()}
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)))
    model.compile(backend="simplefsdp", options=options)
    with inspect() as report:
        wanted = plain(**batch).loss
        loss = model(**{name: local(value) for name, value in batch.items()}).loss
        wanted.backward()
        loss.backward()
    assert global_loss(loss) == pytest.approx(wanted.item(), rel=1e-5)
    largest = max(p.grad.norm().item() for p in plain.parameters() if p.grad is not None)
    for fqn, param in plain.named_parameters():
        grad = model.get_parameter(fqn).grad
        if param.grad is None:  # of what is computed and not used, compiled, there may be zeros
            assert grad is None or not grad.full_tensor().any(), fqn
        else:
            error = relative_error(grad.full_tensor(), param.grad, 1e-6 * largest)
            assert error < 1e-5, (fqn, error)
    return [[b.fqns for b in graph.buckets] for graph in report.graphs.values()]


@pytest.mark.slow
def test_a_model_that_dynamo_breaks(pools):
    """Others are in the matrix: GPT-2, wav2vec 2.0."""
    options = {"executor": "aot_eager", "bucketing": "manual"}
    one, other = pools(2).run(train_and_compare, llava, options)
    assert one == other
    assert len(one) > 2
