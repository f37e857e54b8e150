"""Lightning's Trainer and Fabric with ``strategy="simplefsdp"``, against one process."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sent import Sent
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp._torch import is_compiled

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing")

STEPS, MICRO = 4, 2  # optimizer steps, and batches that each of them adds up
CLIP = 0.05
UNCOMPILED: dict[str, Any] = {"executor": "aot_eager"}


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batches() -> Tensor:
    """By step, micro-batch, rank."""
    return torch.randn(STEPS, MICRO, 2, 3, 6, generator=torch.Generator().manual_seed(1))


def in_one_process(start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained on the same batches, with the same clipping."""
    model = make()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches():
        optimizer.zero_grad()
        model(batch.flatten(0, 2)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict()


def full_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def check_trained(start: dict[str, Tensor], end: dict[str, Tensor]) -> None:
    for name, expected in in_one_process(start).items():
        torch.testing.assert_close(end[name], expected, rtol=1e-5, atol=1e-5)


def check_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def reduces_of(counts: Counter[str]) -> int:
    return sum(n for name, n in counts.items() if name.startswith("reduce_scatter"))


def as_lightning_finds_ranks() -> int:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    return dist.get_rank()


@pytest.mark.slow(quick=["meta-{}"])
@pytest.mark.parametrize("settings", [{}, {"save_distributed_checkpoint": False}], ids=str)
@pytest.mark.parametrize("meta", [False, True], ids=["materialised", "meta"])
def test_fabric_trains_as_one_process_and_resumes_bit_for_bit(own_ranks, tmp_path, meta, settings):
    own_ranks.run(_fabric, tmp_path / "checkpoint", meta, settings)


def _fabric(path: Path, meta: bool, settings: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    from simplefsdp.integrations.lightning import FabricStrategy

    rank = as_lightning_finds_ranks()
    # The first of the tests compiles with Inductor.
    by_name = not settings and not meta
    strategy: Any = "simplefsdp" if by_name else FabricStrategy(options=UNCOMPILED, **settings)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    sent = Sent()

    def set_up() -> tuple[Any, Any]:
        with fabric.init_module(empty_init=meta):
            model = make()
        model = fabric.setup(model)
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))

    def train(model: Any, optimizer: Any, steps: Tensor) -> list[int]:
        counts = []
        for batch in steps:
            for micro in range(MICRO):
                sent.start()
                with fabric.no_backward_sync(model, enabled=micro < MICRO - 1):
                    fabric.backward(model(batch[micro, rank]).square().mean() / MICRO)
                counts.append(reduces_of(sent.stop()))
            norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            assert type(norm) is Tensor  # the same on all ranks, which a DTensor may not be
            optimizer.step()
            optimizer.zero_grad()
        return counts

    model, optimizer = set_up()
    assert not any(p.is_meta for p in model.parameters())
    assert list(model.state_dict()) == list(make().state_dict())
    start = full_of(model.module)
    deferred, reduced, *_ = train(model, optimizer, batches()[:2])
    assert deferred == 0 < reduced
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    train(model, optimizer, batches()[2:])
    end = full_of(model.module)
    check_trained(start, end)

    model, optimizer = set_up()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 2
    train(model, optimizer, batches()[2:])
    check_equal(full_of(model.module), end)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"save_distributed_checkpoint": False}], ids=str)
def test_trainer_trains_as_one_process_and_resumes_bit_for_bit(own_ranks, tmp_path, settings):
    own_ranks.run(_trainer, tmp_path, settings)


def _trainer(folder: Path, settings: dict[str, Any]) -> None:
    from lit_module import Lit, MadeLate

    from simplefsdp.integrations.lightning import TrainerStrategy

    rank = as_lightning_finds_ranks()
    # The first of the tests compiles with Inductor.
    meta = bool(settings)

    def fit(epochs: int, resume: Path | None = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        strategy: Any = TrainerStrategy(options=UNCOMPILED, **settings) if meta else "simplefsdp"
        trainer = trainer_of(folder, strategy, epochs, accumulate_grad_batches=MICRO)
        module = (MadeLate if meta else Lit)(make, batches()[:, :, rank], Sent())
        trainer.fit(module, ckpt_path=resume, weights_only=False)
        assert is_compiled(module.net)
        return trainer, module

    _, whole = fit(2)
    check_trained(whole.start, full_of(whole.net))
    deferred, reduced, *_ = map(reduces_of, whole.counts)
    assert deferred == 0 < reduced
    trainer, _ = fit(1)
    trainer.save_checkpoint(folder / "half")
    trainer, rest = fit(2, folder / "half")
    assert len(rest.counts) == len(whole.counts) // 2
    check_equal(full_of(rest.net), full_of(whole.net))
    trainer.test(rest, verbose=False)  # wraps nothing twice
    assert list(rest.state_dict()) == ["net." + name for name in make().state_dict()]


def trainer_of(folder: Path, strategy: Any, epochs: int, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def test_a_submodule_called_by_the_step_gets_its_inputs_cast(own_ranks, tmp_path):
    own_ranks.run(_cast, tmp_path)


def _cast(folder: Path) -> None:
    from lit_module import Lit

    from simplefsdp.integrations.lightning import TrainerStrategy

    rank = as_lightning_finds_ranks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    trainer = trainer_of(folder, TrainerStrategy(mp_policy=policy, compile=False), 1)
    own = batches()[:, :, rank]
    with trainer.init_module(empty_init=True):
        module = Lit(make, own, Sent())
    assert all(p.is_meta for p in module.parameters())
    trainer.fit(module)
    assert not any(p.is_meta for p in module.parameters())
    assert module.dtype_of_loss == torch.bfloat16
    assert not is_compiled(module.net)


def test_contract_of_lightnings_private_parts(own_ranks):
    own_ranks.run(_contract)


def _contract() -> None:
    from lightning.fabric.strategies import model_parallel
    from lightning.fabric.utilities.init import _materialize_distributed_module
    from lightning.pytorch.strategies import ModelParallelStrategy

    for_fabric = model_parallel.ModelParallelStrategy(lambda module, mesh: module, 2, 3)
    for strategy in (for_fabric, ModelParallelStrategy(2, 3)):
        assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (2, 3)
    assert hasattr(for_fabric._backward_sync_control, "no_backward_sync")
    with torch.device("meta"):
        module = make()
    _materialize_distributed_module(module, torch.device("cpu"))
    assert all(0 < p.abs().max() < 1 for p in module.parameters())
