"""Hugging Face's ``generate``, by ranks that end at different lengths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from simplefsdp import simple_fsdp, unsharded


class Model(nn.Linear):
    def generate(self, inputs: object, synced_gpus: bool | None = None, **_: object) -> object:
        return synced_gpus


def test_ranks_wait_for_others_where_they_gather(fake_mesh):
    mesh = fake_mesh(2)
    model = simple_fsdp(Model(4, 4), mesh)
    assert model.generate(1) is True and model.generate(1, top_k=3) is True
    assert model.generate(1, synced_gpus=False) is False and model.generate(1, False) is False
    model.unshard()
    assert model.generate(1) is None
    model.reshard()
    assert model.generate(1) is True
    with unsharded(model):
        assert model.generate(1) is None
    assert simple_fsdp(Model(4, 4), mesh, mode="replicate").generate(1) is None
    assert simple_fsdp(nn.Sequential(Model(4, 4)), mesh)[0].generate(1) is True


def test_some_ranks_do_not_wait_for_all(fake_mesh):
    some = fake_mesh(2, 4, names=("a", "b"))["b"]
    assert simple_fsdp(Model(4, 4), some).generate(1) is None


def generated() -> int:
    from tiny import llama, wrapped

    model = wrapped(llama(), options=None).eval()
    rank, inputs = dist.get_rank(), torch.randint(32, (2, 5))
    ends = [*range(32)] if rank == 0 else [31]
    tokens = model.generate(
        inputs, max_new_tokens=6, eos_token_id=ends, bad_words_ids=[[31]], pad_token_id=0
    )
    return tokens.shape[1] - inputs.shape[1]


def test_a_rank_that_is_done_goes_on_for_the_others(pools):
    pytest.importorskip("transformers")
    assert pools(2).run(generated) == [1, 6]
