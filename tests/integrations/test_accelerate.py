"""accelerate's usual script, with a model that simple_fsdp wrapped, on two ranks."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tiny import EAGER, assert_equal, fresh_state, values_of, wrapped
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

RANKS = 2
CLIP = 0.05


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Dropout(0.2), nn.Linear(10, 3))


def prepared(accelerator, model, batch_size):
    """The usual script, up to its loop."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(16, n, generator=generator) for n in (6, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # accelerate lets it step once for each process.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, gamma=0.5)
    loader = DataLoader(data, batch_size=batch_size)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, epochs=1):
    """The usual loop: mean losses over all ranks, and norms."""
    log = []
    for x, y in (batch for _ in range(epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            log.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                assert norm > CLIP
                log.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return log


def _train(options):
    from simplefsdp.integrations.accelerate import Accelerator

    fresh_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = wrapped(mlp().eval(), options)
    waits = 0
    own = getattr(model, "no_sync", nullcontext)

    def no_sync():
        nonlocal waits
        waits += 1
        return own()

    model.no_sync = no_sync
    parts = prepared(accelerator, model, batch_size=2)
    assert parts[0] is model and accelerator.unwrap_model(model) is model
    log = train(accelerator, *parts, epochs=2)
    assert waits == 4  # of 8 micro-batches: those whose gradients the next one adds to
    return log, values_of(model), accelerator.get_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, None], ids=["compiled", "not compiled"])
def test_trains_as_one_process_does(pools, options):
    fresh_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(accelerator, mlp().eval(), batch_size=4)
    expected = train(accelerator, *parts, epochs=2)
    values = values_of(parts[0])
    logs = pools(RANKS).run(_train, options)
    for log, sharded, _ in logs:
        assert len(log) == 12 and log == pytest.approx(expected, abs=1e-6)
        assert_equal(sharded, values, tolerance=1e-5)
    assert_equal(logs[0][2], logs[0][1])  # the whole model, on rank 0 alone
    assert logs[1][2] == {}


def _in_another_module(model):
    return torch.compile(wrapped(model, options=None), backend="simplefsdp", options=EAGER)


def _resume(folder):
    from simplefsdp.integrations.accelerate import Accelerator

    fresh_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(accelerator, _in_another_module(mlp()), batch_size=2)
    train(accelerator, *parts)
    accelerator.save_state(str(folder / "state"))
    log = train(accelerator, *parts)
    accelerator.save_model(parts[0], str(folder / "model"))

    fresh_state()
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    new = prepared(again, _in_another_module(mlp(seed=1)), batch_size=2)
    again.load_state(str(folder / "state"))
    assert train(again, *new) == log
    values = values_of(accelerator.unwrap_model(parts[0], keep_torch_compile=False))
    assert_equal(values_of(again.unwrap_model(new[0], keep_torch_compile=False)), values)
    assert new[3].get_last_lr() == parts[3].get_last_lr() != [1e-2]
    return values


def test_a_saved_state_goes_on_bit_for_bit(pools, tmp_path):
    """With dropout; every rank wrote its shards, and a whole model is written when asked for."""
    from safetensors.torch import load_file

    values = pools(RANKS).run(_resume, tmp_path)[0]
    assert_equal(load_file(tmp_path / "model" / "model.safetensors"), values)
    shards = sorted(path.name for path in (tmp_path / "state" / "simplefsdp").iterdir())
    assert shards == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]
    assert not list((tmp_path / "state").glob("*.safetensors"))
    assert not list((tmp_path / "state").glob("optimizer*"))


class _ListOfAverages:
    """As diffusers' ``EMAModel``: a list of tensors, and numbers."""

    def __init__(self, model):
        self.shadow = [param.detach().clone() for param in model.parameters()]
        self.steps = 0

    def state_dict(self):
        return {"shadow": self.shadow, "steps": self.steps, "stored": None}

    def load_state_dict(self, state):
        assert state["stored"] is None
        self.shadow, self.steps = state["shadow"], state["steps"]


class _Plain:
    number = 3

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def _fulls(tensors):
    return [t.full_tensor().clone() for t in tensors]


def _registered(folder):
    """One optimizer of a wrapped model and of a plain one; averages of the former."""
    from simplefsdp.integrations.accelerate import Accelerator

    def parts(seed):
        fresh_state()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = wrapped(nn.Linear(4, 3), options=None)  # ranks have two rows, and one
        plain = nn.Linear(3, 2)
        every = [*model.parameters(), *plain.parameters()]
        optimizer = torch.optim.AdamW(every, lr=1e-2)
        averages = torch.optim.swa_utils.AveragedModel(model), _ListOfAverages(model), _Plain()
        accelerator.register_for_checkpointing(averages[2], *averages[:2])
        model, plain, optimizer = accelerator.prepare(model, plain, optimizer)
        return accelerator, model, plain, optimizer, averages

    def step(model, plain, optimizer):
        plain(model(torch.ones(2, 4))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator, model, plain, optimizer, averages = parts(0)
    step(model, plain, optimizer)
    averages[0].update_parameters(model)
    averages[1].steps, averages[2].number = 7, 5
    accelerator.save_state(str(folder / "state"))
    shadows = [*averages[0].module.parameters(), *averages[1].shadow]
    wanted = _fulls(shadows)
    step(model, plain, optimizer)
    after = values_of(model), {k: v.clone() for k, v in plain.state_dict().items()}

    again, model, plain, optimizer, averages = parts(1)
    again.load_state(str(folder / "state"))
    shadows = [*averages[0].module.parameters(), *averages[1].shadow]
    assert all(map(torch.equal, _fulls(shadows), wanted))
    assert (averages[1].steps, averages[2].number) == (7, 5)
    step(model, plain, optimizer)
    assert_equal(values_of(model), after[0])
    assert_equal(plain.state_dict(), after[1])
    # What has grown since, or was made later, is as accelerate loads it; here it has no shards yet.
    averages[1].shadow.clear()
    again.load_state(str(folder / "state"))
    whole = [t for t in averages[1].shadow if not isinstance(t, DTensor)]
    assert len(whole) == 2 and all(map(torch.equal, whole, wanted[-2:]))


def test_averages_that_are_registered_are_saved_in_full(pools, tmp_path):
    pools(RANKS).run(_registered, tmp_path)
    path = tmp_path / "state" / "custom_checkpoint_2.pkl"
    state = torch.load(path, weights_only=True)  # as one of DDP's
    assert [tuple(t.shape) for t in state["shadow"]] == [(3, 4), (3,)]


class _Pair(NamedTuple):
    one: torch.Tensor
    other: int


@dataclass
class _Hidden:
    tensor: torch.Tensor


class _Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_states_keep_their_kinds(solo_mesh):
    from simplefsdp.integrations.registered import Loaded, Saved

    shard = wrapped(nn.Linear(4, 4), options=None).weight.detach()
    full = shard.full_tensor()
    state = OrderedDict({"a.b": 1, "a": {"b": 2}, 0: _Pair(shard, 3), "0": (4, shard)})
    state["size"] = torch.Size([2, 3])
    saved = Saved(_Holder(state), keep=True).state_dict()
    assert type(saved) is OrderedDict and type(saved[0]) is _Pair and saved["size"] == (2, 3)
    assert (saved["a.b"], saved["a"]["b"], saved["0"][0]) == (1, 2, 4)
    assert torch.equal(saved[0].one, full) and type(saved[0].one) is torch.Tensor
    assert isinstance(state[0].one, DTensor)  # as it was

    new = _Holder({**state, 0: _Pair(torch.zeros_like(shard), 0)})
    Loaded(new).load_state_dict(saved)
    assert isinstance(new.state[0].one, DTensor) and new.state[0].other == 3
    assert torch.equal(new.state[0].one.full_tensor(), full)
    assert isinstance(new.state["0"][1], DTensor) and type(new.state["size"]) is torch.Size

    with pytest.raises(ValueError, match="_Holder holds shards in something else than dicts"):
        Saved(_Holder([_Hidden(shard)]), keep=True)
    with pytest.raises(ValueError, match=r"registered _Holder this checkpoint has rank 0's rows"):
        Loaded(new).load_state_dict(state)


def test_what_a_state_cannot_be_cut_by_is_told(solo_mesh, monkeypatch):
    """Not taken for a place that the state of now has not."""
    from simplefsdp.integrations import registered

    def fail(*_):
        raise TypeError("no such placement")

    shard = wrapped(nn.Linear(4, 4), options=None).weight.detach()
    monkeypatch.setattr(registered, "distribute", fail)
    with pytest.raises(TypeError, match="no such placement"):
        registered.Loaded(_Holder({"a": [shard]})).load_state_dict({"a": [shard.full_tensor()]})


def test_others_only_help(solo_mesh):
    from simplefsdp.integrations.registered import Saved

    shard = wrapped(nn.Linear(4, 4), options=None).weight.detach()
    assert Saved(_Holder({"a": shard}), keep=False).state_dict() == {"a": None}


def _refused():
    from simplefsdp.integrations.accelerate import Accelerator

    fresh_state()
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    with pytest.raises(ValueError, match=r"even_batches=False: .* leave it True"):
        accelerator.prepare(wrapped(mlp()))
    accelerator.prepare(nn.Linear(2, 2))  # of others it is as ever


def test_ranks_that_would_run_out_of_batches_are_refused(pools):
    pools(RANKS).run(_refused)


def _alone():
    """On a machine without GPUs accelerate counts one process, whatever started the others."""
    from simplefsdp.integrations.accelerate import Accelerator

    fresh_state()
    told = r"knows of 1 of the 2 ranks .* Accelerator\(cpu=True\), or TrainingArguments\(use_cpu"
    with pytest.raises(ValueError, match=told):
        Accelerator().prepare(wrapped(mlp(), options=None))
    Accelerator().prepare(nn.Linear(2, 2))
    fresh_state()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
def test_ranks_that_accelerate_does_not_know_of_are_refused(pools):
    pools(RANKS).run(_alone)


def test_tensor_parallelism_is_refused(fake_mesh):
    from simplefsdp import simple_fsdp
    from simplefsdp.integrations.accelerate import Accelerator

    fresh_state()
    mesh = fake_mesh(2, 2, names=("dp", "tp"))
    model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    simple_fsdp(model, mesh["dp"])
    with pytest.raises(ValueError, match="model: its tensor-parallel ranks need equal batches"):
        Accelerator(cpu=True).prepare(model)


def _overflow():
    model = wrapped(mlp(), options=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = values_of(model)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[-1].fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(values_of(model), before)
    assert scaler.get_scale() == 8.0


def test_a_loss_scaler_skips_the_step_on_all_ranks(pools):
    """Of float16, which accelerate takes on GPUs only."""
    pools(RANKS).run(_overflow)
