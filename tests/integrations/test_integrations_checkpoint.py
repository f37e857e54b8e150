"""What integrations save and load: of which model, of which optimizer, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_equal, values_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp
from simplefsdp.checkpoints import checksums
from simplefsdp.cli import main
from simplefsdp.integrations import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Counting(torch.optim.Optimizer):
    """Its state: a number that is no tensor, three that are one, and a scalar called step."""

    def __init__(self, params, scale=1.0):
        super().__init__(params, {"scale": scale})

    def step(self):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["seen"] = state.get("seen", 0) + 1
                state["three"] = torch.full((3,), float(state["seen"]))
                state["step"] = torch.tensor(float(state["seen"]))
                state["mean"] = torch.zeros_like(param) + state["seen"]
                param.data.add_(param.grad, alpha=-group["scale"])


class Parts(nn.Module):
    """A scalar, a frozen parameter, one that is not used, a tie, and a buffer."""

    def __init__(self, width=4):
        super().__init__()
        self.used, self.unused, self.tied = (nn.Linear(width, width) for _ in range(3))
        self.tied.weight = self.used.weight
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        return self.tied(self.used(x)) * self.scalar + self.frozen


def stepped(model, optimizer, n=2):
    for _ in range(n):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model, optimizer):
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: state for param, state in optimizer.state.items()}


@pytest.mark.parametrize("cls", [Counting, torch.optim.AdamW])
def test_round_trip(solo_mesh, tmp_path, cls):
    one, other = (simple_fsdp(Parts(), solo_mesh) for _ in range(2))
    mine, fresh = (cls(model.parameters()) for model in (one, other))
    stepped(one, mine)
    mine.param_groups[0]["later"] = 3  # as schedulers do
    checkpoint.save(tmp_path, [one], [mine])
    checkpoint.load(tmp_path, [other])
    checkpoint.load_optimizers(tmp_path, [other], [fresh])
    assert_equal(values_of(other), values_of(one))
    assert other.count == 2 and other.tied.weight is other.used.weight
    assert fresh.param_groups[0]["later"] == 3
    expected, found = states(one, mine), states(other, fresh)
    assert found.keys() == expected.keys() == {"used.weight", "used.bias", "tied.bias", "scalar"}
    for name, state in expected.items():
        assert found[name].keys() == state.keys()
        for key, value in state.items():
            assert type(found[name][key]) is type(value)
            assert torch.equal(
                torch.as_tensor(plain(found[name][key])), torch.as_tensor(plain(value))
            )
    stepped(one, mine)
    stepped(other, fresh)
    assert_equal(values_of(other), values_of(one))


def plain(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_two_models_in_one_optimizer(solo_mesh, tmp_path):
    def made():
        models = [simple_fsdp(nn.Linear(4, 4), solo_mesh) for _ in range(2)]
        params = [p for model in models for p in model.parameters()]
        return models, torch.optim.AdamW(params)

    models, optimizer = made()
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, models, [optimizer])
    others, fresh = made()
    checkpoint.load(tmp_path, others)
    checkpoint.load_optimizers(tmp_path, others, [fresh])
    for model, other in zip(models, others, strict=True):
        assert_equal(values_of(other), values_of(model))
        for param, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(
                *(plain(o.state[p]["exp_avg"]) for o, p in [(optimizer, param), (fresh, twin)])
            )


def test_frozen_parameters_may_be_left_out(tmp_path):
    model = Parts()
    checkpoint.save(tmp_path, [model], frozen=False)
    other = Parts()
    other.frozen.data.fill_(7)
    with pytest.raises(ValueError, match=r"it has no model.frozen, which is \[4\]"):
        checkpoint.load(tmp_path, [other])
    checkpoint.load(tmp_path, [other], frozen=False)
    assert torch.equal(other.used.weight, model.used.weight) and other.frozen[0] == 7


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(4, 5), r"of another model: it has \[4, 4\] for model.weight, which is \[5, 4\]"),
        (
            nn.Linear(4, 4, bias=False),
            "of another model: it has model.bias, which this one has not",
        ),
        (nn.ModuleDict({"a": nn.Linear(4, 4)}), r"it has no model.a.weight, which is \[4, 4\]"),
    ],
)
def test_another_model_is_refused(tmp_path, other, message):
    checkpoint.save(tmp_path, [nn.Linear(4, 4)])
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, [other])


def test_another_optimizer_is_refused(tmp_path):
    model = nn.Linear(4, 4)
    checkpoint.save(tmp_path, [model], [torch.optim.SGD(model.parameters())])
    groups = [{"params": [param]} for param in model.parameters()]
    with pytest.raises(ValueError, match=r"has \[2\] parameters in its groups, this one \[1, 1\]"):
        checkpoint.load_optimizers(tmp_path, [model], [torch.optim.SGD(groups)])
    with pytest.raises(ValueError, match=r"its parameter of shape \(4, 4\) is none of the models'"):
        checkpoint.save(tmp_path, [nn.Linear(4, 4)], [torch.optim.SGD(groups)])


def test_what_was_not_written_to_its_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not complete: it has no \.metadata"):
        checkpoint.load(tmp_path, [nn.Linear(4, 4)])


class Ended(Exception):
    """As if the process had ended."""


def ending(function, at, *, after):
    """``function``, which ends the process in its call number ``at``: before it, or after it."""
    calls = []

    def ends(*args):
        calls.append(args)
        if len(calls) < at or after:
            found = function(*args)
        if len(calls) == at:
            raise Ended
        return found

    return ends


# Each moment of a save, by what was done last or is next.
MOMENTS = {
    "nothing is written": (FileSystemWriter, "write_data", 1, False),
    "a shard is": (FileSystemWriter, "write_data", 1, True),
    "and hashed": (checksums, "write", 1, False),
    "and has its checksum": (checksums, "write", 1, True),
    "and the metadata is": (FileSystemWriter, "finish", 1, True),
    "and hashed, too": (checksums, "write", 2, False),
}


@pytest.mark.parametrize("there", ["nothing", "a checkpoint", "one without checksums"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_save_leaves_that_ended_is_refused(tmp_path, monkeypatch, capsys, there, moment):
    """It was loaded without a word of its checksums, or what was complete was called damaged."""
    if there != "nothing":
        checkpoint.save(tmp_path, [nn.Linear(4, 4)])
    if there == "one without checksums":
        (tmp_path / checksums.NAME).unlink()
    model = nn.Linear(4, 4)
    owner, name, at, after = MOMENTS[moment]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, ending(getattr(owner, name), at, after=after))
        with pytest.raises(CheckpointException):
            checkpoint.save(tmp_path, [model])
    with pytest.raises(ValueError, match=r"has no \.metadata; resume|interrupted; copy it"):
        checkpoint.load(tmp_path, [nn.Linear(4, 4)])
    with pytest.raises(SystemExit) as exit_:
        main(["verify", str(tmp_path)])
    assert exit_.value.code != 0
    checkpoint.save(tmp_path, [model])
    checkpoint.load(tmp_path, [other := nn.Linear(4, 4)])
    assert_equal(values_of(other), values_of(model))
    with pytest.raises(SystemExit) as exit_:
        main(["verify", str(tmp_path)])
    assert exit_.value.code == 0
    assert "2 files, " in capsys.readouterr().out
