"""What a sweep takes as the batch and the sequence of a model, and configurations of anybody's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.sweep.models import SweptModel, swept_target, swept_transformers


def swept(*example: Any) -> SweptModel:
    return swept_target("model", lambda mesh: torch.nn.Linear(1, 1), lambda: (example, {}))


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def test_only_what_is_as_long_as_batch_and_sequence_grows():
    model = swept(
        torch.ones(100),  # as weights of classes
        tokens(2, 16),
        torch.arange(16),
        torch.ones(16, 8),
        torch.ones(1, 16),
        torch.ones(2),
        torch.ones(2, 1, 16, 16),
        torch.ones(()),
        "as it is",
    )
    (*grown, word), by_name = model.inputs(3, 64)
    shapes = [(100,), (3, 64), (64,), (64, 8), (1, 64), (3,), (3, 1, 64, 64), ()]
    assert [tuple(x.shape) for x in grown] == shapes
    assert word == "as it is" and by_name == {}
    assert model.open_sizes == ("batch", "seq")


def test_without_tokens_the_first_tensor_has_the_batch():
    model = swept(torch.ones(()), torch.ones(2, 64), torch.ones(5))
    assert [tuple(x.shape) for x in model.inputs(3, None)[0]] == [(), (3, 64), (5,)]
    assert model.open_sizes == ("batch",)


def test_keyword_arguments_grow_as_others_do():
    by_name = {"mask": torch.ones(2, 16), "input_ids": tokens(2, 16), "scale": 2.0}
    model = swept_target("model", lambda mesh: torch.nn.Linear(1, 1), lambda: ((), by_name))
    positional, grown = model.inputs(3, 64)
    assert positional == () and grown.pop("scale") == 2.0
    assert {name: tuple(x.shape) for name, x in grown.items()} == {
        "mask": (3, 64),
        "input_ids": (3, 64),
    }


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ([tokens(16, 16), torch.arange(16)], "tokens of batch 16 and sequence 16"),
        ([tokens(2, 1)], "tokens of batch 2 and sequence 1"),
        ([torch.ones(()), 3], "no tensor with dimensions"),
    ],
)
def test_examples_that_do_not_tell_a_batch_from_a_sequence(example, told):
    with pytest.raises(ValueError, match=f"--input: .*{told}"):
        swept(*example)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of_transformers(folder: Path, config: Any, layers: int | None = None) -> SweptModel:
    pytest.importorskip("transformers")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return swept_transformers(folder, ModelOptions("", "none"), ParallelOptions(), layers)


def test_a_good_configuration(tmp_path):
    found = of_transformers(tmp_path, LLAMA)
    assert (found.depth, found.layers) == (2, "model.model.layers")


BAD = {
    "no number of layers": LLAMA | {"num_hidden_layers": None},
    "no layers": LLAMA | {"num_hidden_layers": 0},
    "a width of words": LLAMA | {"hidden_size": "x"},
    "a rope of words": LLAMA | {"rope_scaling": "x"},
    "no heads": LLAMA | {"num_attention_heads": 0},
    "an unknown activation": LLAMA | {"hidden_act": "x"},
    "fewer words than none": LLAMA | {"vocab_size": -1},
    "less room than none": LLAMA | {"max_position_embeddings": -1},
    "an unknown model": {"model_type": "x"},
    "no model": {},
    "a list": [LLAMA],
    "nested deeply": '{"a":' * 5000 + "1" + "}" * 5000,
    "cut short": '{"model_type": "llama"',
}


@pytest.mark.parametrize("name", BAD)
def test_configurations_that_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--hf .*: no configuration .*use --target$") as error:
        of_transformers(tmp_path, BAD[name])
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("known", [True, False])
def test_code_beside_a_configuration_is_neither_run_nor_asked_for(monkeypatch, tmp_path, known):
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *told: asked.append(told) or "y")
    ran = tmp_path / "ran"
    (tmp_path / "its.py").write_text(f"open({str(ran)!r}, 'w')\n")
    names = {"AutoConfig": "its.Config", "AutoModelForCausalLM": "its.Model"}
    config = LLAMA | {"model_type": "llama" if known else "its", "auto_map": names}
    if known:
        assert of_transformers(tmp_path, config).depth == 2
    else:
        with pytest.raises(ValueError, match="no configuration of a language model"):
            of_transformers(tmp_path, config)
    assert not ran.exists() and not asked


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_more_layers_than_a_configuration_has_are_refused(tmp_path, model_type):
    config = LLAMA | {"model_type": model_type}
    assert of_transformers(tmp_path, config, 1).depth == 1
    with pytest.raises(ValueError, match=r"--layers 5: --hf .* has 2"):
        of_transformers(tmp_path, config, 5)
