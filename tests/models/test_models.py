"""The Llama 3 family: sizes, numerics, initialisation, recomputation, tensor parallelism."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simplefsdp.models import CONFIGS, LlamaConfig, flops_per_token, num_parameters
from simplefsdp.models.llama3 import Llama, RMSNorm, RotaryEmbedding, apply_rope, rope_frequencies
from simplefsdp.models.tensor_parallel import apply_tensor_parallel

TINY = LlamaConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=64
)
PUBLISHED = {
    "1b": 1_235_814_400,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}
MODES = ("none", "selective", "full")


def tiny(mode="none", **changes) -> Llama:
    torch.manual_seed(0)
    return Llama(dataclasses.replace(TINY, **changes), mode)


def tokens(batch=2, seq=16) -> torch.Tensor:
    return torch.randint(64, (batch, seq), generator=torch.Generator().manual_seed(1))


def loss_and_grads(call, model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    x = tokens()
    loss = F.cross_entropy(call(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {fqn: p.grad.clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = Llama(CONFIGS[name])
    built = sum(p.numel() for p in model.parameters())
    assert num_parameters(CONFIGS[name]) == built == PUBLISHED.get(name, built)


def test_small_configs_have_the_size_they_are_named_for():
    assert 2e6 < num_parameters(CONFIGS["debug"]) < 4e6
    assert 150e6 < num_parameters(CONFIGS["160m"]) < 170e6


def test_no_token_sees_a_later_one():
    model, x = tiny(), tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 64
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_rope_scores_depend_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, TINY.head_dim, generator=generator).expand(2, 1, 1, 64, -1)
    cos, sin = RotaryEmbedding(TINY)(64)
    turned_q, turned_k = apply_rope(q, cos, sin)[0, 0], apply_rope(k, cos, sin)[0, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, 0].norm(dim=-1))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    assert scores[0].std() > 0.1


def test_rope_scaling_stretches_long_wavelengths_only():
    config = CONFIGS["8b"]
    scaled = rope_frequencies(config)
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    wavelength = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert (scaled.diff() < 0).all()


def test_bf16_weights_keep_every_activation_in_bf16():
    model = tiny().bfloat16()
    model.rotary_emb.float()  # mixed precision gathers parameters in bf16 and leaves buffers
    seen = {}
    for fqn, module in model.named_modules():
        if not list(module.children()) and fqn != "rotary_emb":
            module.register_forward_hook(
                lambda _m, args, out, fqn=fqn: seen.update({fqn: (args[0].dtype, out.dtype)})
            )
    assert model(tokens()).dtype == torch.bfloat16
    assert {out for _, out in seen.values()} == {torch.bfloat16}
    assert {x for fqn, (x, _) in seen.items() if fqn != "embed_tokens"} == {torch.bfloat16}


def test_rms_norm_does_its_math_in_fp32():
    x = torch.full((1, 32), 1000.0, dtype=torch.float16)  # its square is infinite in fp16
    y = RMSNorm(32, 1e-5).half()(x)
    assert y.dtype == torch.float16
    assert torch.equal(y, torch.ones_like(x))


@pytest.mark.parametrize("tie", [False, True])
def test_meta_to_empty_reset_equals_direct_construction(tie):
    config = dataclasses.replace(TINY, tie_embeddings=tie)

    def reset(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(float("nan"))
    expected, built = reset(Llama(config)), reset(model)
    assert list(expected.state_dict()) == list(built.state_dict())
    for a, b in zip(
        (*expected.parameters(), *expected.buffers()),
        (*built.parameters(), *built.buffers()),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_rope_tables_are_not_saved():
    assert not any("rotary" in fqn for fqn in tiny().state_dict())


def test_residual_matrices_start_smaller_with_depth():
    layer = tiny(dim=256, ffn_dim=256, n_layers=8).layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert matrix.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.slow(quick=["False"])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_changes_neither_names_nor_numbers(compiled):
    results = {}
    for mode in MODES:
        model = tiny(mode)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        results[mode] = loss_and_grads(call, model)
    loss, grads = results.pop("none")
    for other_loss, other_grads in results.values():
        assert torch.equal(loss, other_loss)
        assert list(grads) == list(other_grads)
        for fqn, grad in grads.items():
            torch.testing.assert_close(grad, other_grads[fqn], rtol=1e-6, atol=1e-8)


def test_selective_repeats_no_matmul_and_full_repeats_the_forward():
    flops = {}
    for mode in MODES:
        model = tiny(mode)
        with FlopCounterMode(display=False) as counter:
            loss_and_grads(model, model)
        flops[mode] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]


def test_full_keeps_little_more_than_one_input_per_layer():
    kept = {}
    for mode in ("none", "full"):
        storages = {}

        def pack(tensor, storages=storages):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        model = tiny(mode, n_layers=8)
        weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens())
        kept[mode] = sum(storages.values()) - weights
    assert 5 * kept["full"] < kept["none"]


def test_it_compiles_in_one_graph():
    model = tiny("selective", n_layers=1)
    loss, grads = loss_and_grads(model, model)
    compiled_loss, compiled_grads = loss_and_grads(
        torch.compile(model, fullgraph=True, backend="aot_eager"), model
    )
    torch.testing.assert_close(compiled_loss, loss)
    for fqn, grad in grads.items():
        torch.testing.assert_close(compiled_grads[fqn], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tie", [False, True])
def test_flops_formula_counts_the_matmuls(tie):
    model = tiny(tie_embeddings=tie)
    x = tokens(batch=2, seq=16)
    # The math kernel, because the fused backward counts its own recomputation.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    expected = flops_per_token(model.config, 16) - 6 * norms
    assert counter.get_total_flops() == expected * x.numel()


def test_tied_embedding_learns_from_both_ends():
    model = tiny(tie_embeddings=True)
    assert model.lm_head is None
    model(torch.full((1, 4), 5)).sum().backward()
    rows = model.embed_tokens.weight.grad.abs().sum(1)
    assert (rows > 0).all()  # token 5 alone was looked up; the others serve as output


def test_deepcopy_is_independent():
    model = tiny("full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.zero_()
    assert model(tokens()).abs().sum() > 0
    assert twin(tokens()).abs().sum() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 3}, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"dim": 36}, r"dim \(36\) must be a multiple of 2 \* n_heads"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
    ],
)
def test_impossible_config(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"'none', 'selective', 'full'.*'half'"):
        Llama(TINY, "half")
    with pytest.raises(ValueError, match="sequence of 65 tokens is longer than max_seq_len 64"):
        tiny()(tokens(seq=65))


def test_tensor_parallel_matches_one_rank(pools):
    """One pair of ranks checks everything that tensor parallelism needs of the model."""
    pools(2).run(_tensor_parallel_body)


def _tensor_parallel_body() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for tie in (False, True):
        model = tiny(tie_embeddings=tie)
        whole = loss_and_grads(model, model)
        reductions = {}
        for mode in MODES:
            split = apply_tensor_parallel(tiny(mode, tie_embeddings=tie), mesh)
            assert split.layers[0].self_attn.k_proj.weight.to_local().shape == (8, 32)
            with CommDebugMode() as communication:
                _assert_same(loss_and_grads(split, split), whole)
            reductions[mode] = communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        assert reductions["none"] == reductions["selective"] < reductions["full"]
    with pytest.raises(ValueError, match=r"n_kv_heads = 1 does not divide among 2 .* \[1\]"):
        apply_tensor_parallel(tiny(n_kv_heads=1), mesh)
    with pytest.raises(ValueError, match=r'1-D mesh, got 2 dimensions.*mesh\["tp"\]'):
        apply_tensor_parallel(tiny(), init_device_mesh("cpu", (1, 2)))
    with torch.device("meta"):
        meta = apply_tensor_parallel(Llama(CONFIGS["8b"]), mesh)
    assert sum(p.numel() for p in meta.parameters()) == num_parameters(CONFIGS["8b"])


def _assert_same(split, whole) -> None:
    torch.testing.assert_close(split[0], whole[0])
    for fqn, grad in split[1].items():
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(full, whole[1][fqn], msg=lambda m, fqn=fqn: f"{fqn}: {m}")
