"""How a checkpoint leaves the device, on a device that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from simplefsdp.train import runs
from simplefsdp.train.checkpoint import CheckpointWriter, pinned_stager
from simplefsdp.train.runs import TrainerState


def test_saves_from_cuda_share_pinned_memory(
    solo_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next save takes the memory of the last, which has been written then."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    pinned: list[bool] = []
    init = StateDictStager.__init__

    def spy(self: StateDictStager, *args: Any, **kwargs: Any) -> None:
        pinned.append(kwargs["pin_memory"])
        init(self, *args, **kwargs)

    monkeypatch.setattr(StateDictStager, "__init__", spy)
    staged: list[Any] = []
    writer = CheckpointWriter(tmp_path, 2, torch.device("cuda"), nbytes=1, say=print)
    stage = writer._stager.stage
    monkeypatch.setattr(writer._stager, "stage", lambda t: staged.append(stage(t)) or staged[-1])
    weight = DTensor.from_local(torch.zeros(4, 3), solo_mesh, [Shard(0)])
    tensors = {"model": {"weight": weight}, "step": torch.tensor(0.0)}
    for step in (1, 2):
        weight.add_(1)
        tensors["step"].add_(1)
        writer.save(tensors, TrainerState(step=step, world_size=1, config={}, data={}))
        weight.add_(1)  # training goes on; what was staged is a copy
    writer.wait()
    assert writer.error is None
    for step, value in ((1, 1), (2, 3)):
        found = {"model": {"weight": torch.empty(4, 3)}, "step": torch.empty(())}
        dcp.load(found, checkpoint_id=str(runs.step_folder(tmp_path, step)), no_dist=True)
        assert torch.equal(found["model"]["weight"], torch.full((4, 3), float(value)))
        assert found["step"] == step
    one, two = (s["model"]["weight"].to_local().data_ptr() for s in staged)
    assert one == two != weight.to_local().data_ptr()
    assert pinned == ([True] if torch.__version__ >= (2, 13) else [])  # else another class pins
    assert pinned_stager(torch.device("cpu")) is None
