"""transformers' models that drop layers at random, each rank for itself unless they share them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from simplefsdp import simple_fsdp
from simplefsdp.frontend import layerdrop

AOT = {"executor": "aot_eager"}


def is_fsdp_managed_module(module: nn.Module) -> bool:
    return False


is_fsdp_managed_module.__module__ = "transformers.distributed.fsdp"


class Encoder(nn.Linear):
    def forward(self, x):
        return super().forward(x) if is_fsdp_managed_module(self) else x


class Inherits(Encoder):
    def forward(self, x):
        return super().forward(x)


def test_who_asks_is_answered_if_wrapped(solo_mesh):
    model, plain = simple_fsdp(nn.Sequential(Encoder(4, 4)), solo_mesh), Encoder(4, 4)
    x = torch.ones(2, 4)
    assert not torch.equal(model(x), x)
    assert torch.equal(plain(x), x)
    asked = Encoder.forward.__globals__["is_fsdp_managed_module"]
    simple_fsdp(Encoder(4, 4), solo_mesh)
    inner = simple_fsdp(Inherits(4, 4), solo_mesh)
    assert not torch.equal(inner(x), x)
    assert Encoder.forward.__globals__["is_fsdp_managed_module"] is asked  # not again and again


def test_others_are_left_alone_and_warned_of(solo_mesh, caplog):
    for rate, config in ((0.0, "plain"), (0.1, "warned")):
        plain = nn.Linear(4, 4)
        plain.config = SimpleNamespace(encoder_layerdrop=rate)
        model = simple_fsdp(plain, solo_mesh)
        assert layerdrop._KEEPS not in model.__dict__
        warned = "encoder_layerdrop 0.1: ranks that drop other layers" in caplog.text
        assert warned == (config == "warned")


def wav2vec2(dropped: float) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    size = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0)
    kernels = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    config = Wav2Vec2Config(
        num_hidden_layers=3,
        num_attention_heads=2,
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_proj_dropout=0.0,
        apply_spec_augment=False,
        layerdrop=dropped,
        **size,
        **off,
        **kernels,
    )
    return Wav2Vec2Model(config).train()


def trained(compiled: bool) -> None:
    """Ranks that draw other numbers, beside a model that drops nothing."""
    plain, model = wav2vec2(0.0), simple_fsdp(wav2vec2(0.5))
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="simplefsdp", options=AOT)
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(7 * dist.get_rank())
    for _ in range(2):
        x = torch.randn(2, 200, generator=generator)
        for one in (plain, model):
            one(x).last_hidden_state.square().sum().backward()
    for fqn, param in model.named_parameters():
        own = plain.get_parameter(fqn).grad
        if own is None:
            assert param.grad is None
            continue
        dist.all_reduce(own, op=dist.ReduceOp.SUM)
        torch.testing.assert_close(param.grad.full_tensor(), own / dist.get_world_size())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_that_draw_other_layers_train_all_of_them(pools, compiled):
    pytest.importorskip("transformers")
    pools(2).run(trained, compiled)
