"""Models of transformers: their folders into shards, and ours into ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import load_pretrained, save_pretrained, simple_fsdp, unsharded
from simplefsdp.pretrained import save

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 67,  # uneven on 2 ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def llama(**more):
    return transformers.LlamaConfig(**TEXT, **more)


def gemma3():
    """Tied, and with buffers that no file has: frequencies, and the scale of the embedding."""
    return transformers.Gemma3TextConfig(**TEXT, pad_token_id=0, sliding_window=8)


def mixtral():
    """Its experts are merged, in files they lie one by one."""
    return transformers.MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2)


CONFIGS = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama scaled": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }
    ),
    "gemma3": gemma3,
}


def plain_model(config):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for param in model.parameters():  # so that greedy choices differ, and no norm is a constant
        torch.nn.init.normal_(param, 0.1, 0.3)
    return model.eval()


def on_meta(config, auto=transformers.AutoModelForCausalLM):
    with torch.device("meta"):
        return auto.from_config(config)


def generate_and_save(config, folder: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = simple_fsdp(on_meta(config), init_device_mesh("cpu", (dist.get_world_size(),)))
    load_pretrained(model, folder)
    model.eval()
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    tied = config.tie_word_embeddings
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    tokens = torch.randint(1, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
    save_pretrained(model, folder / "again", max_shard_size=10_000)
    with unsharded(model, writeback=False):
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "theirs")


@pytest.mark.parametrize("config", CONFIGS)
def test_a_checkpoint_end_to_end(pools, tmp_path, config):
    """Loaded, it generates the same tokens; saved, ``from_pretrained`` gives the same logits."""
    made = CONFIGS[config]()
    plain = plain_model(made)
    plain.save_pretrained(tmp_path, max_shard_size=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    pools(2).run(generate_and_save, made, tmp_path)
    tokens = torch.randint(1, 60, (2, 9))
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    for folder in (tmp_path / "again", tmp_path / "theirs"):
        files = list(folder.glob("*.safetensors"))
        assert {name for file in files for name in load_file(file)} == names
        again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, plain(tokens).logits)
        assert again.config.architectures == plain.config.architectures == [type(plain).__name__]
        assert again.generation_config.to_dict() == plain.generation_config.to_dict()
    assert {f.name for f in (tmp_path / "again").glob("*.json")} == {
        f.name for f in tmp_path.glob("*.json")
    }


def test_its_dtype_is_in_the_config(solo_mesh, tmp_path):
    plain_model(llama()).bfloat16().save_pretrained(tmp_path / "x")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16)
    load_pretrained(simple_fsdp(model, solo_mesh), tmp_path / "x")
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    save_pretrained(model, tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype == torch.bfloat16
    assert (tmp_path / "x" / "model.safetensors").stat().st_size == (
        tmp_path / "again" / "model.safetensors"
    ).stat().st_size


def test_with_and_without_its_head(solo_mesh, tmp_path):
    """A base model's folder for a model with a head, and the other way round."""
    whole = plain_model(llama())
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    base = simple_fsdp(on_meta(llama(), transformers.AutoModel), solo_mesh)
    with pytest.raises(ValueError, match=r"folder: the model has no lm_head.weight\. Build "):
        load_pretrained(base, tmp_path / "whole")
    left = load_pretrained(base, tmp_path / "whole", strict=False)
    assert left == ([], ["lm_head.weight"])
    head = simple_fsdp(transformers.AutoModelForCausalLM.from_config(llama()), solo_mesh)
    with pytest.raises(ValueError, match=r"folder: it lacks lm_head.weight\. Build "):
        load_pretrained(head, tmp_path / "base")
    left = load_pretrained(head, tmp_path / "base", strict=False)
    assert left == (["lm_head.weight"], [])
    for fqn, param in whole.model.named_parameters():
        assert torch.equal(base.get_parameter(fqn).full_tensor(), param), fqn
        assert torch.equal(head.model.get_parameter(fqn).full_tensor(), param), fqn


def test_files_have_older_names(solo_mesh, tmp_path):
    """transformers write some names as they were in earlier releases; so do we."""
    vision = {**TEXT, "image_size": 28, "patch_size": 14}
    for name in ("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        del vision[name]
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision), text_config=llama()
    )
    torch.manual_seed(1)
    plain = transformers.LlavaForConditionalGeneration(config)
    plain.save_pretrained(tmp_path / "x")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert saved.keys() != plain.state_dict().keys()
    model = on_meta(config, transformers.AutoModelForImageTextToText)
    load_pretrained(simple_fsdp(model, solo_mesh), tmp_path / "x")
    for fqn, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(fqn).full_tensor(), param), fqn
    for fqn, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(fqn), buffer), fqn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_room_for", None)  # renaming needs nothing whole
        save_pretrained(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)


def save_mixtral(folder: Path) -> None:
    torch.manual_seed(1)
    model = simple_fsdp(plain_model(mixtral()), init_device_mesh("cpu", (2,)))
    save_pretrained(model, folder / "ours", max_shard_size=20_000)
    meta = simple_fsdp(on_meta(mixtral()), init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"are merged by transformers .*from_pretrained\(\)"):
        load_pretrained(meta, folder / "ours")


def test_experts_are_split_as_transformers_do(pools, tmp_path):
    pools(2).run(save_mixtral, tmp_path)
    plain = plain_model(mixtral())
    plain.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert any(".experts.2.w1." in name for name in theirs)
    ours = {
        n: t for f in (tmp_path / "ours").glob("*.safetensors") for n, t in load_file(f).items()
    }
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(1, 60, (2, 9))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, plain(tokens).logits)


def test_adapters_are_not_a_model(solo_mesh, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(plain_model(llama()), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match=r"has adapters of PEFT; save those by simplefsdp\.integrations\.peft"
    ):
        save_pretrained(simple_fsdp(adapted, solo_mesh), tmp_path / "x")


def test_its_own_method_would_write_shards(solo_mesh, tmp_path):
    model = simple_fsdp(plain_model(llama()), solo_mesh)
    told = r"shards; call it on rank 0 .* simplefsdp\.save_pretrained\(model, folder\) on all ranks"
    with pytest.raises(ValueError, match=told):
        model.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with unsharded(model):
        model.save_pretrained(tmp_path / "y")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "y")
