"""transformers' Trainer, with models that simple_fsdp wrapped, on two ranks."""

from __future__ import annotations

import functools
import inspect
import os

import pytest
import torch
import torch.distributed as dist
from tiny import assert_equal, fresh_state, llama, sentences, values_of, wrapped
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from simplefsdp import simple_fsdp
from simplefsdp.integrations import checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANKS = 2


def arguments(folder, **changes):
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.3,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        }
    )


def logged(trainer, *names):
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
        if any(name in entry for name in names)
    ]


def sharded(model, args, **more):
    from simplefsdp.integrations.transformers import Trainer

    return Trainer(model, args, train_dataset=sentences(16), eval_dataset=sentences(6), **more)


def _alone(folder):
    fresh_state()
    with pytest.raises(ValueError, match="knows of 1 of the 2 ranks that the model is"):
        sharded(wrapped(llama(), options=None), arguments(folder, use_cpu=False))
    fresh_state()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
def test_ranks_that_accelerate_does_not_know_of_are_refused(pools, tmp_path):
    pools(RANKS).run(functools.partial(_alone, tmp_path))


def _train(folder):
    fresh_state()
    args = arguments(folder, per_device_train_batch_size=2, per_device_eval_batch_size=1)
    trainer = sharded(wrapped(llama()), args)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    return first, logged(trainer, "loss", "grad_norm", "eval_loss"), values_of(trainer.model)


@pytest.mark.slow
def test_trains_as_one_process_does(pools, tmp_path):
    """Where ranks count other numbers of tokens, gradients accumulate, and are clipped."""
    fresh_state()
    args = arguments(tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=2)
    data = {"train_dataset": sentences(16), "eval_dataset": sentences(6)}
    plain = transformers.Trainer(llama(), args, **data)
    first_expected = plain.evaluate()["eval_loss"]
    plain.train()
    expected = logged(plain, "loss", "grad_norm", "eval_loss")
    assert min(entry.get("grad_norm", 9) for entry in expected) > args.max_grad_norm
    for first, log, values in pools(RANKS).run(_train, tmp_path):
        assert first == pytest.approx(first_expected, rel=1e-6)
        assert len(log) == len(expected) == 6
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=1e-6)
        assert_equal(values, values_of(plain.model), tolerance=1e-5)


def _count_reduces(folder, micro_batches):
    fresh_state()
    args = arguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=micro_batches,
        eval_strategy="no",
    )
    trainer = sharded(wrapped(llama(), options=None), args)
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        trainer.train()
    # As they were recorded: to find which is inside of which takes as long as the training.
    recorded = traced.profiler.kineto_results.events()
    return sum("reduce_scatter_tensor" in event.name() for event in recorded)


def test_accumulation_reduces_once_a_step(pools, tmp_path):
    once = pools(RANKS).run(_count_reduces, tmp_path, 1)
    assert once[0] > 0 and pools(RANKS).run(_count_reduces, tmp_path, 4) == once


def _dropping():
    """Another random state would be another result."""
    return wrapped(llama(attention_dropout=0.2))


def _resumable(folder, **changes):
    fresh_state()
    args = arguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=1,  # 4 steps are an epoch
        save_strategy="steps",
        save_steps=2,
        **changes,
    )
    trainer = sharded(_dropping(), args)
    at_last = {}

    class Note(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                at_last.update(values_of(trainer.model))

    trainer.add_callback(Note())
    return trainer, at_last


def _resume(folder):
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that it is not the last one
        "save_total_limit": 2,
    }
    straight, at_last = _resumable(folder, **best)
    straight.train()
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    straight.save_model(str(folder / "best"))
    predicted = straight.predict(sentences(6)).predictions
    chosen = values_of(straight.model)

    again, resumed_at_last = _resumable(folder)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_equal(resumed_at_last, at_last)
    losses = [logged(trainer, "loss", "grad_norm", "eval_loss") for trainer in (straight, again)]
    return kept, losses, chosen, at_last, predicted


@pytest.mark.slow
def test_resume_goes_on_bit_for_bit_and_the_best_model_is_loaded_and_saved(pools, tmp_path):
    """In the middle of an epoch, with dropout."""
    for kept, losses, chosen, at_last, predicted in pools(RANKS).run(_resume, tmp_path):
        straight, again = losses
        assert len(straight) == 9 and again == straight
        assert kept == ["checkpoint-2", "checkpoint-6"]  # the best one, and the last
        assert any(not torch.equal(chosen[name], at_last[name]) for name in chosen)
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "best")
        assert_equal(values_of(plain), chosen)
        inputs = torch.stack([sentence["input_ids"] for sentence in sentences(6)])
        torch.testing.assert_close(torch.from_numpy(predicted), plain(inputs).logits)
    assert not list(tmp_path.glob("checkpoint-*/*.safetensors"))  # no rank held the model
    plain = llama(attention_dropout=0.9)
    checkpoint.load(tmp_path / "checkpoint-2" / "simplefsdp", [plain])  # without any ranks
    assert_equal(values_of(plain), chosen)


def _with_arguments(folder):
    """What the arguments say, on an uncompiled model; autocast on a compiled one."""
    fresh_state()
    only = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    args = arguments(folder, gradient_checkpointing=True, **only)
    trainer = sharded(wrapped(llama(), options=None), args)
    trainer.train()
    fresh_state()
    cast = sharded(wrapped(llama()), arguments(folder, bf16=True, max_steps=1))
    cast.train()
    return values_of(trainer.model), logged(cast, "loss")


@pytest.mark.slow
def test_arguments(pools, tmp_path):
    """Checkpoints that are for use only; less memory for activations; autocast."""
    fresh_state()
    plain = transformers.Trainer(
        llama(),
        arguments(tmp_path, bf16=True, max_steps=1, per_device_train_batch_size=16),
        train_dataset=sentences(16),
        eval_dataset=sentences(6),
    )
    plain.train()
    for values, losses in pools(RANKS).run(_with_arguments, tmp_path):
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
        assert_equal(values_of(saved), values)
        assert losses == [pytest.approx(loss, rel=1e-6) for loss in logged(plain, "loss")]


def _saves_alone(folder):
    from simplefsdp.rank_guard import RankMismatchError

    fresh_state()
    trainer = sharded(wrapped(llama()), arguments(folder))
    checkpoint.agree = functools.partial(checkpoint.agree, timeout_s=0.5)
    try:
        if trainer.is_world_process_zero():
            with pytest.raises(RankMismatchError, match=r"what is gathered .* rank 1 did not get"):
                trainer.save_model()
        dist.barrier()
        if not trainer.is_world_process_zero():
            with pytest.raises(RankMismatchError, match=r"rank 0 gave up waiting for rank 1"):
                trainer.save_model()
    finally:
        checkpoint.agree = checkpoint.agree.func


def test_a_rank_that_saves_alone_does_not_hang(pools, tmp_path):
    pools(RANKS).run(_saves_alone, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile": True}, r"torch_compile: .* call model\.compile\(\)"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: .* per_device_train_batch_size"),
        ({"bf16_full_eval": True}, "bf16_full_eval: .* mp_policy"),
        ({"optim": "adafactor"}, "optim: adafactor mixes plain tensors"),
    ],
)
def test_arguments_that_are_refused(solo_mesh, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("os.environ", dict(os.environ))  # which torch_compile changes
    model = wrapped(llama(), options=None)
    with pytest.raises(ValueError, match=message):
        sharded(model, arguments(tmp_path, **changes))


def test_an_optimizer_that_is_given_is_asked_for_nothing(solo_mesh, tmp_path):
    model = wrapped(llama(), options=None)
    given = torch.optim.SGD(model.parameters(), lr=0.1), None
    assert sharded(model, arguments(tmp_path, optim="adafactor"), optimizers=given).optimizer


def test_models_that_are_refused(solo_mesh, tmp_path):
    with pytest.raises(ValueError, match=r"simple_fsdp wrapped, got LlamaForCausalLM; wrap it"):
        sharded(llama(), arguments(tmp_path))
    model = torch.compile(wrapped(llama(), options=None), backend="simplefsdp")
    with pytest.raises(ValueError, match=r'call model\.compile\(backend="simplefsdp"\)'):
        sharded(model, arguments(tmp_path))


@pytest.mark.parametrize("wraps_itself", [True, False])
def test_a_model_that_the_trainer_makes(solo_mesh, tmp_path, wraps_itself):
    """As for ``hyperparameter_search``, each training begins with a new one."""
    made = []

    def plain():
        return llama()

    def model_init():
        made.append(plain())
        return wrapped(made[-1], options=None) if wraps_itself else made[-1]

    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    wrap = None if wraps_itself else simple_fsdp
    trainer = sharded(None, args, model_init=model_init, wrap=wrap)
    trainer.train()
    first = values_of(trainer.model)
    trainer.train()
    assert len(made) == 3 and trainer.model is made[-1]
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert_equal(values_of(trainer.model), first)
    with pytest.raises(ValueError, match="simple_fsdp wrapped, got LlamaForCausalLM"):
        sharded(None, args, model_init=plain)


def test_embeddings_are_resized_before_the_wrap(solo_mesh):
    model = wrapped(llama(), options=None)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(32) is model.get_input_embeddings()
    for changed in ((40,), (None, 64), (30,)):
        with pytest.raises(ValueError, match=r"resize_token_embeddings: .* before simple_fsdp"):
            model.resize_token_embeddings(*changed)


def _resume_from_model_only(folder):
    fresh_state()
    only = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    sharded(wrapped(llama(), options=None), arguments(folder, max_steps=1, **only)).train()
    trainer = sharded(wrapped(llama(), options=None), arguments(folder))
    with pytest.raises(ValueError, match="checkpoint-1 has no folder 'simplefsdp'"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_a_checkpoint_without_the_optimizers_shards_is_refused(pools, tmp_path):
    pools(RANKS).run(_resume_from_model_only, tmp_path)


def test_what_the_trainer_does_otherwise_is_what_transformers_calls():
    """Its private methods are overridden: they must be there, and take the same."""
    from simplefsdp.integrations.transformers import Trainer

    own = {name for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    own -= {"__annotate_func__"}  # from Python 3.14 on
    assert own > {"save_model", "_load_from_checkpoint"}
    for name in own - {"__init__"}:
        theirs = inspect.signature(getattr(transformers.Trainer, name)).parameters.values()
        ours = inspect.signature(getattr(Trainer, name)).parameters.values()
        assert [(p.kind, p.default) for p in ours] == [(p.kind, p.default) for p in theirs], name
    source = inspect.getsource(transformers.Trainer)
    for name in own - {"__init__", "create_accelerator_and_postprocess"}:
        assert f"self.{name}(" in source, name


def test_a_trainer_of_another_library_may_come_behind_it():
    from simplefsdp.integrations.transformers import Trainer

    class Both(Trainer, transformers.Seq2SeqTrainer):
        pass

    assert Both.mro()[1:4] == [Trainer, transformers.Seq2SeqTrainer, transformers.Trainer]


class Adding(transformers.Trainer):
    """As TRL's: adds to the model, and has another to compare it with."""

    def __init__(self, model, args, **others):
        model.extra = nn.Parameter(torch.zeros(4))
        super().__init__(model, args, **others)
        self.ref_model = llama()


def test_what_a_trainer_adds_itself_is_wrapped(solo_mesh, tmp_path):
    from simplefsdp.integrations.transformers import Trainer

    class Both(Trainer, Adding):
        pass

    args = arguments(tmp_path, eval_strategy="no")
    trainer = Both(llama(), args, wrap=simple_fsdp)
    for param in (*trainer.model.parameters(), *trainer.ref_model.parameters()):
        assert isinstance(param, DTensor)
    with pytest.raises(ValueError, match="extra: is not sharded") as error:
        Both(wrapped(llama(), options=None), args)
    assert "Trainer(..., wrap=function)" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="expected one that simple_fsdp wrapped"):
        Both(llama(), args, wrap=lambda model: None)


class Asking(transformers.Trainer):
    """As sentence-transformers': has the model write itself, and batches as they come."""

    def get_train_dataloader(self):
        self.accelerator.even_batches = False
        return super().get_train_dataloader()

    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir)


def _asking(folder):
    from simplefsdp.integrations.transformers import Trainer

    class Both(Trainer, Asking):
        pass

    fresh_state()
    args = arguments(folder, max_steps=1, eval_strategy="no", dataloader_drop_last=True)
    trainer = Both(wrapped(llama(), options=None), args, train_dataset=sentences(33))
    trainer.train()
    trainer.save_model(str(folder / "asked"))
    return values_of(trainer.model)


def test_a_trainer_that_has_the_model_write_itself(pools, tmp_path):
    for values in pools(RANKS).run(_asking, tmp_path):
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "asked")
        assert_equal(values_of(saved), values)


def _words():
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(29))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _trl(folder, kind, batch_size):
    """Three steps of a trainer of TRL, which adds adapters, or sets the model's forward."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    from simplefsdp.integrations.transformers import Trainer

    fresh_state()
    names = ("prompt", "chosen", "rejected") if kind == "dpo" else ("text",)
    rows = [{n: " ".join(f"w{(i * j + len(n)) % 29}" for j in range(5)) for n in names}
            for i in range(24)]  # fmt: skip
    base, config = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "adapters": (trl.SFTTrainer, trl.SFTConfig),
        "all": (trl.SFTTrainer, trl.SFTConfig),
    }[kind]
    args = config(str(folder), use_cpu=True, max_steps=3, logging_steps=1, report_to=[], bf16=False,
                  per_device_train_batch_size=batch_size, learning_rate=1e-2, save_strategy="no",
                  gradient_checkpointing=False, disable_tqdm=True)  # fmt: skip
    more = {"train_dataset": Dataset.from_list(rows), "processing_class": _words()}
    if kind != "all":
        torch.manual_seed(3)
        more["peft_config"] = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    if dist.is_initialized():

        def wrap(model):
            wrapped(model, options=None)

        trainer = type("Both", (Trainer, base), {})(llama(), args=args, wrap=wrap, **more)
    else:
        trainer = base(llama(), args=args, **more)
    trainer.train()
    return logged(trainer, "loss", "grad_norm"), values_of(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "adapters", "dpo"])
def test_trainers_of_trl(pools, tmp_path, kind):
    pytest.importorskip("trl")
    expected, plain = _trl(tmp_path, kind, 4)
    assert len(expected) == 3
    for log, values in pools(RANKS).run(_trl, tmp_path, kind, 2):
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=1e-4)
        assert_equal(values, plain, tolerance=1e-4)
