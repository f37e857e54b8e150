"""A LightningModule for tests on ranks; import it there, for Lightning changes torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Lit(LightningModule):
    """Trains ``net`` on ``data``, of which an epoch takes its own half.

    Args:
        make: makes ``net``.
        data: by step, and what one step adds up.
        sent: counts what batches send.
    """

    def __init__(self, make: Callable[[], nn.Module], data: Tensor, sent: Any) -> None:
        super().__init__()
        self.make, self.data, self.sent = make, data, sent
        self.counts: list[Any] = []
        self.set_up()

    def set_up(self) -> None:
        self.net = self.make()

    def on_fit_start(self) -> None:
        self.start = {name: p.detach().full_tensor() for name, p in self.net.named_parameters()}

    def on_train_batch_start(self, *_: Any) -> None:
        self.sent.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.sent.stop())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.dtype_of_loss = loss.dtype
        return loss

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        half = self.data.chunk(2)[self.trainer.current_epoch % 2]
        return torch.utils.data.DataLoader(half.flatten(0, 1), batch_size=None)

    test_dataloader = train_dataloader


class MadeLate(Lit):
    """Makes its layers in ``configure_model``, on the meta device."""

    def set_up(self) -> None:
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = self.make()
