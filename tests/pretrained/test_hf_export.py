"""Export to `transformers`: the same logits from the folder, and nothing half-written."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate

from simplefsdp.models import CONFIGS, LlamaConfig, RopeScaling
from simplefsdp.models.hf import to_hf_config, to_hf_name, write_hf_folder
from simplefsdp.models.llama3 import Llama

# The original context is short, so that all three branches of the scaling matter.
SCALED = LlamaConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=64,
    rope_theta=100.0, rope_scaling=RopeScaling(factor=8.0, original_context=24),
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
UNSCALED = dataclasses.replace(SCALED, rope_scaling=None)
TIED = dataclasses.replace(SCALED, tie_embeddings=True)


def build(config: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    model = Llama(config)
    with torch.no_grad():  # so that nothing is a constant, not even a norm
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


@pytest.mark.parametrize("config", [SCALED, UNSCALED, TIED], ids=["scaled", "unscaled", "tied"])
@pytest.mark.parametrize("max_shard_nbytes", [10**9, 20_000], ids=["one_file", "sharded"])
def test_transformers_gives_the_same_logits(tmp_path, config, max_shard_nbytes):
    transformers = pytest.importorskip("transformers")
    model = build(config)
    folder = tmp_path / "deep" / "export"
    tensors = model.state_dict().items()
    write_hf_folder(folder, config, tensors, max_shard_nbytes=max_shard_nbytes)

    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    assert theirs.dtype == torch.float32
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)
    assert [p.name for p in folder.parent.iterdir()] == ["export"]


def test_names_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(SCALED)))
        ours = Llama(SCALED).state_dict()
    assert {to_hf_name(fqn) for fqn in ours} == set(theirs.state_dict())


def test_config_json_is_metas_own():
    config = to_hf_config(CONFIGS["8b"], torch.bfloat16)
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 131072
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_shards_stay_below_their_limit_and_the_index_is_complete(tmp_path):
    model = build(SCALED)
    write_hf_folder(tmp_path / "x", SCALED, model.state_dict().items(), max_shard_nbytes=20_000)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "x").glob("*.safetensors"))
    assert [f.name for f in files] == sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    total = 0
    for file in files:
        shard = load_file(file)
        assert {name for name, f in index["weight_map"].items() if f == file.name} == set(shard)
        nbytes = sum(t.nbytes for t in shard.values())
        assert nbytes <= 20_000
        total += nbytes
    assert total == index["metadata"]["total_size"]


def test_dtype_casts_weights_and_says_so(tmp_path):
    model = build(TIED)
    write_hf_folder(tmp_path / "x", TIED, model.state_dict().items(), dtype=torch.bfloat16)
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert torch.equal(saved["model.norm.weight"], model.norm.weight.detach().bfloat16())
    assert json.loads((tmp_path / "x" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def _broken(state: dict, how: str) -> list:
    items = list(state.items())
    return {
        "missing": items[:-1],
        "unknown": [*items, ("layers.9.mlp.up_proj.weight", items[0][1])],
        "twice": [*items, items[0]],
        "shape": [(items[0][0], items[0][1][:-1]), *items[1:]],
        "mixed": [(items[0][0], items[0][1].bfloat16()), *items[1:]],
    }[how]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("missing", ValueError, r"1 parameters are missing \(lm_head.weight\)"),
        ("unknown", ValueError, "no parameter layers.9.mlp.up_proj.weight"),
        ("twice", ValueError, "embed_tokens.weight was given twice"),
        ("shape", ValueError, r"embed_tokens.weight has shape \(63, 32\), .* needs \(64, 32\)"),
        ("mixed", TypeError, "is torch.float32, those before it are torch.bfloat16: pass dtype="),
    ],
)
def test_a_refused_export_leaves_nothing(tmp_path, how, error, message):
    tensors = _broken(build(SCALED).state_dict(), how)
    with pytest.raises(error, match=message):
        write_hf_folder(tmp_path / "x", SCALED, tensors, max_shard_nbytes=20_000)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_export_is_not_touched(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ValueError, match="already exists: choose another folder"):
        write_hf_folder(tmp_path, SCALED, build(SCALED).state_dict().items())
    assert (tmp_path / "keep").read_text() == "mine"


def test_a_sharded_tensor_is_refused_rather_than_gathered(tmp_path, fake_mesh):
    mesh = fake_mesh(2)
    state = {
        fqn: DTensor.from_local(tensor, mesh, [Replicate()])
        for fqn, tensor in build(SCALED).state_dict().items()
    }
    with pytest.raises(TypeError, match=r"embed_tokens.weight is a DTensor.*full_tensor\(\)"):
        write_hf_folder(tmp_path / "x", SCALED, state.items())
