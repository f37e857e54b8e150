"""LoRA: the base is frozen and sharded; adapters train, and only they are gathered and saved."""

from __future__ import annotations

import pytest
import torch
from test_transformers_trainer import arguments, logged, sharded
from tiny import EAGER, assert_equal, fresh_state, llama, sentences, values_of, wrapped
from torch.distributed.tensor.debug import CommDebugMode

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANKS = 2


def with_lora(**changes):
    model = llama()  # which seeds
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes
    )
    return peft.get_peft_model(model, config)


def batch():
    parts = sentences(4)
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _by_hand(folder, changes, options):
    from simplefsdp.integrations.peft import save_pretrained

    model = wrapped(with_lora(**changes), options)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with CommDebugMode() as sent:
        save_pretrained(model, folder)
    return frozen, values_of(model), sent.get_total_counts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [({}, EAGER), ({"use_dora": True, "modules_to_save": ["lm_head"]}, None)],
    ids=["lora, compiled", "dora, and a head"],
)
def test_adapters_train_and_are_saved(pools, tmp_path, changes, options):
    model = with_lora(**changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = values_of(model)
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = values_of(model)
    for frozen, values, sent in pools(RANKS).run(_by_hand, tmp_path, changes, options):
        assert_equal(values, expected, tolerance=1e-5)
        assert all(torch.equal(values[name], before[name]) for name in frozen)
        assert sent == len(values) - len(frozen)  # nothing of the frozen base
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    trained = {name: value for name, value in values.items() if name not in frozen}
    assert_equal({name: values_of(loaded)[name] for name in trained}, trained)


def _trainer(folder):
    fresh_state()
    args = arguments(folder, save_strategy="steps", save_steps=2)
    straight = sharded(wrapped(with_lora(), EAGER), args)
    straight.train()
    straight.save_model()
    again = sharded(wrapped(with_lora(), EAGER), args)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    values = values_of(straight.model)
    assert_equal(values_of(again.model), values)
    first = {"metric_for_best_model": "loss", "greater_is_better": True, "save_only_model": True}
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    args = arguments(folder / "best", **first, **saves)
    best = sharded(wrapped(with_lora(), options=None), args)
    best.train()
    assert best.state.best_global_step == 2
    plain = peft.PeftModel.from_pretrained(llama(), best.state.best_model_checkpoint)
    assert_equal(values_of(plain), values_of(best.model))
    return [
        logged(trainer, "loss", "grad_norm", "eval_loss") for trainer in (straight, again)
    ], values


@pytest.mark.slow
def test_the_trainer_saves_adapters_only_and_goes_on_bit_for_bit(pools, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    answers = pools(RANKS).run(_trainer, tmp_path)
    for (straight, again), _ in answers:
        assert len(straight) == 6 and again == straight
    values = answers[0][1]
    loaded = values_of(peft.PeftModel.from_pretrained(llama(), tmp_path))
    assert_equal(loaded, values)
    saved = FileSystemReader(tmp_path / "checkpoint-2" / "simplefsdp").read_metadata()
    names = [name for name in saved.state_dict_metadata if name.startswith("model.")]
    assert len(names) == 4 and all("lora" in name for name in names)
