"""Packed buckets, on real ranks and through every executor: the numbers of those that are not.

There is no kernel for the CPU: the operators' plain twins run in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from parity import POLICIES, mesh_for
from test_bucketing import train
from torch import Tensor, nn
from torch._inductor import config
from zoo import VOCAB, WIDTH, Zoo

from inductor_passes import passes
from inductor_passes.adapters import copies, packs
from inductor_passes.ir.program import Collective
from simplefsdp import simple_fsdp


class Tiny(nn.Module):
    """Uneven on two ranks, and soon compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.head = nn.Linear(10, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.embed(tokens))))


def every_other(members: Sequence[Collective], *_: object) -> range:
    return range(0, len(members), 2)


@contextmanager
def all_packed() -> Iterator[Counter[str]]:
    """Buckets are packed, as if there were kernels; how often each operator was called."""
    called: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., object]:
        def run(*args: object) -> object:
            called[name] += 1
            return getattr(packs, name)(*args)

        return run

    with (
        pytest.MonkeyPatch.context() as patch,
        config.patch(fx_graph_cache=False),
        torch.library._scoped_library("inductor_passes", "FRAGMENT") as library,
    ):
        patch.setattr(copies, "has_kernel", lambda device: True)
        patch.setattr(passes, "has_kernel", lambda device: True)
        patch.setattr(passes, "members_to_pack", every_other)
        for name in ("pack", "unpack"):
            library.impl(name, counted(name), "CPU", allow_override=True)
        yield called


def compare_with_unpacked(build, executors):
    torch.manual_seed(1)
    model = simple_fsdp(build(), mesh_for("fully_shard"), mp_policy=POLICIES["bf16"])
    for executor in executors:
        options = {"bucketing": "auto", "memory_budget_gb": 1.0, "executor": executor}
        losses, gradients, _ = train(model, options, steps=1)
        with all_packed() as called:
            got_losses, got_gradients, _ = train(model, options, steps=1)
        assert called["pack"] and called["unpack"], executor
        assert got_losses == losses, executor
        assert all(map(torch.equal, got_gradients, gradients)), executor


@pytest.mark.slow
def test_every_kind_of_parameter(pools):
    pools(2).run(compare_with_unpacked, Zoo, ["aot_eager"])


@pytest.mark.slow
@pytest.mark.inductor
def test_generated_code(fake_mesh):
    """A gather repeats this rank's shard: the bits are those of the same, not packed."""
    fake_mesh(2)
    compare_with_unpacked(Tiny, ["inductor", "regions"])
