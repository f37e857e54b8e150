"""Random modules with random options, the whole way: compiled, trained a step, and looked into."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fx_graphs import Recorder, same_numbers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.adapters import fx
from inductor_passes.ir.program import Program
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.transform.order import OverlapPolicy
from simplefsdp import simple_fsdp
from simplefsdp.compiler.backend import simplefsdp
from simplefsdp.provenance import carried_fqn as fqn_of

WIDTH, VOCAB = 6, 7  # neither divides among 4 ranks


class Leaf(nn.Module):
    """Parameters of one of many kinds, read in a forward that keeps ``[..., WIDTH]``."""

    def __init__(self, rng: random.Random, tied: list[nn.Linear]) -> None:
        super().__init__()
        self.kind = rng.choice(
            ["linear", "norm", "scalar", "gain", "narrow", "frozen", "tied", "unused", "twice"]
        )
        inner = rng.randint(1, 9)
        if self.kind in ("linear", "frozen", "twice", "unused"):
            self.up = nn.Linear(WIDTH, inner, bias=rng.random() < 0.5)
            self.down = nn.Linear(inner, WIDTH, bias=rng.random() < 0.5)
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif self.kind == "tied":
            self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
            if tied:
                self.shared.weight = rng.choice(tied).weight
            tied.append(self.shared)
        else:
            shape = () if self.kind == "scalar" else (WIDTH,)
            dtype = torch.bfloat16 if self.kind == "narrow" else torch.float32
            self.factor = nn.Parameter(torch.full(shape, rng.uniform(0.5, 1.5), dtype=dtype))
        if self.kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "unused":
            return x.sin()
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "tied":
            return self.shared(x)
        if hasattr(self, "factor"):
            return x * self.factor.to(x.dtype)
        for _ in range(2 if self.kind == "twice" else 1):
            x = self.down(torch.tanh(self.up(x)))
        return x


class Nest(nn.Module):
    """Leaves, nests and lists of them, one after the other, and sometimes a residual."""

    def __init__(self, rng: random.Random, tied: list[nn.Linear], depth: int) -> None:
        super().__init__()
        self.residual = rng.random() < 0.5
        self.order: list[str] = []
        for i in range(rng.randint(1, 3)):
            name = rng.choice(["part", "block", "x"]) + str(i)
            self.order.append(name)
            self.add_module(name, make(rng, tied, depth - 1))

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for name in self.order:
            part = getattr(self, name)
            for module in part if isinstance(part, nn.ModuleList) else [part]:
                x = module(x)
        return before + x if self.residual else x


def make(rng: random.Random, tied: list[nn.Linear], depth: int) -> nn.Module:
    sort = rng.choice(["leaf", "nest", "list"]) if depth > 0 else "leaf"
    if sort == "list":
        return nn.ModuleList(make_one(rng, tied, depth - 1) for _ in range(rng.randint(1, 3)))
    return Nest(rng, tied, depth) if sort == "nest" else Leaf(rng, tied)


def make_one(rng: random.Random, tied: list[nn.Linear], depth: int) -> nn.Module:
    return Nest(rng, tied, depth) if depth > 0 and rng.random() < 0.5 else Leaf(rng, tied)


class Fuzzed(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Nest(rng, [], 2) for _ in range(rng.randint(1, 3)))
        self.body = Nest(rng, [], 3)
        self.head = nn.Linear(WIDTH, VOCAB, bias=rng.random() < 0.5)
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.body(x))


def random_buckets(rng: random.Random, model: Fuzzed) -> list[Any] | None:
    """Paths of modules and parameters that are read, some together, some as globs; or None."""
    if rng.random() < 0.3:
        return None
    unused = [f"{p}." for p, m in model.named_modules() if getattr(m, "kind", "") == "unused"]
    fqns = [n for n, _ in model.named_parameters() if not n.startswith(tuple(unused) or ("\0",))]
    parts = [fqn.split(".") for fqn in fqns]
    paths = list(dict.fromkeys(".".join(p[: i + 1]) for p in parts for i in range(len(p))))
    chosen = rng.sample(paths, min(len(paths), rng.randint(1, 6)))
    if rng.random() < 0.5:  # then nothing else may name a layer
        chosen = ["layers.*", *(p for p in chosen if p.count(".") != 1 or p[0] != "l")]
        chosen = chosen if any(p.startswith("layers.") for p in paths) else chosen[1:]
    together = chosen[: rng.randint(0, len(chosen))]
    return [*([together] if together else []), *chosen[len(together) :]]


def random_options(rng: random.Random, model: Fuzzed) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options, and settings that are none."""
    merges = rng.random() < 0.85
    bucketing = rng.choice(["manual", "auto"]) if merges else "none"
    limits = rng.randint(1, 4), rng.randint(1, 4)
    buckets = random_buckets(rng, model)
    reorder = rng.choice([True, False, None]) if merges else True
    layout = rng.choice(["coalesced", "flat"])
    options = {
        "executor": "aot_eager",
        "bucketing": bucketing,
        "reorder": None if bucketing == "auto" else reorder,
        "separate_reduce_group": rng.random() < 0.2,
        **({} if bucketing == "auto" else {"buckets": buckets}),
    }
    settings = {"layout": layout}
    return options, settings if bucketing == "auto" else settings | {
        "policy": OverlapPolicy(*limits)
    }


MODES = ["fully_shard", "hybrid_shard", "replicate"]
SEEDS = (0, 2, 3, 5, 9, 10, 28)  # what they draw is checked below


def launches(program: Program) -> int:
    return sum(op.collective.kind != "other" for _, op in program.starts())


@pytest.mark.slow(quick=["2"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_module(fake_mesh, monkeypatch, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Fuzzed(rng)
    options, others = random_options(rng, model)
    mode = MODES[seed % 3]
    policy = rng.choice(
        [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy()]
    )
    simple_fsdp(
        model,
        fake_mesh(2, 2) if mode == "hybrid_shard" else fake_mesh(4),
        mode=mode,
        mp_policy=policy,
        reshard_after_forward=rng.random() < 0.5,
    )
    passes = Recorder(monkeypatch)
    backend = partial(simplefsdp, options=options, adjust=lambda s: replace(s, **others))
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(torch.randint(0, VOCAB, (3, 4))).float().square().mean().backward()
    grads = {n: p.grad is not None for n, p in model.named_parameters() if p.requires_grad}
    unused = {p for p, m in model.named_modules() if getattr(m, "kind", "") == "unused"}
    assert {n for n, got in grads.items() if not got} == {
        n for n in grads if n.rpartition(".")[0].rpartition(".")[0] in unused
    }
    assert len(passes.before) == len(passes.after) == 2
    for graphs in zip(passes.before, passes.after, strict=True):
        before, after = (fx.read(graph, fqn_of).program.verify() for graph in graphs)
        verify_unchanged(before, after)
        assert launches(after) <= launches(before)
        if options["bucketing"] == "none":
            assert launches(after) == launches(before)
        assert same_numbers(*graphs)


def test_the_modules_and_options_are_of_every_kind():
    kinds, combined, layouts = set(), set(), set()
    for seed in SEEDS:
        rng = random.Random(seed)
        model = Fuzzed(rng)
        kinds |= {m.kind for m in model.modules() if isinstance(m, Leaf)}
        options, others = random_options(rng, model)
        combined.add((MODES[seed % 3], options["bucketing"]))
        layouts.add((MODES[seed % 3], others["layout"]))
    assert len(kinds) == 9
    assert {(mode, b) for mode in MODES for b in ("manual", "auto")} < combined
    assert {("fully_shard", "coalesced"), ("fully_shard", "flat")} < layouts
