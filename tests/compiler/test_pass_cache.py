"""The FX-graph cache and the passes: what hits, what misses, and ranks of which only some hit."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import pickletools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import inductor_passes
import simplefsdp
from inductor_passes.passes import ImposeOrder
from inductor_passes.transform.order import OverlapPolicy
from simplefsdp import simple_fsdp
from simplefsdp.compiler import backend, cache_key
from simplefsdp.compiler.options import parse_options

WIDTH = 8
MANUAL = {"bucketing": "manual"}
CPU = torch.device("cpu")


class Two(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compile_and_run(
    mesh: DeviceMesh, options: dict[str, object], *, grad=True, adjust=None, depth=2
):
    """Loss of the first step, as a new process would make it, and hits and misses of the cache."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = simple_fsdp(Two(depth), mesh)
    compiler = functools.partial(backend.simplefsdp, options=options, adjust=adjust)
    run = torch.compile(model, backend=compiler, fullgraph=True)
    x = torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH
    with torch.set_grad_enabled(grad):
        loss = run(x).square().mean()
    if grad:
        loss.backward()
    found = counters["inductor"]
    assert found["fxgraph_cache_bypass"] == 0, "the passes keep Inductor from caching"
    return loss.item(), (found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])


def test_the_second_compilation_hits(fake_mesh):
    mesh = fake_mesh(4)
    with fresh_cache():
        found = [compile_and_run(mesh, MANUAL)[1] for _ in range(2)]
    assert found == [(0, 2), (2, 0)]  # forward and backward


@pytest.mark.slow
def test_with_layers_that_are_not_traced(fake_mesh, caplog):
    mesh = fake_mesh(4)
    with fresh_cache(), caplog.at_level("DEBUG", "simplefsdp"):
        found = [compile_and_run(mesh, MANUAL, depth=9)[1] for _ in range(2)]
    assert caplog.text.count("layers were not traced") == 2
    assert found == [(0, 2), (2, 0)]


OTHERS = [
    {"buckets": ["layers"]},
    {"reorder": False},
    {"bucketing": "auto"},
    {"bucketing": "auto", "cluster": "h100"},
    {"bucketing": "none"},
    {"bucketing": "none", "reorder": True},
]


def test_a_changed_option_misses(fake_mesh):
    mesh = fake_mesh(4)
    with fresh_cache():
        for options in [
            MANUAL,
            {**MANUAL, **OTHERS[0]},
        ]:  # of the others the ids are compared below
            assert compile_and_run(mesh, options, grad=False)[1] == (0, 1), options
        for same in [MANUAL, {**MANUAL, "rank_guard_timeout_s": 0}]:
            assert compile_and_run(mesh, same, grad=False)[1] == (1, 0), same


def test_adjusted_settings_miss(fake_mesh):
    mesh = fake_mesh(4)

    def flat(settings):
        return dataclasses.replace(settings, layout="flat")

    with fresh_cache():
        assert compile_and_run(mesh, MANUAL, grad=False)[1] == (0, 1)
        assert compile_and_run(mesh, MANUAL, grad=False, adjust=flat)[1] == (0, 1)
        assert compile_and_run(mesh, MANUAL, grad=False, adjust=flat)[1] == (1, 0)


def test_options_have_ids_of_their_own():
    specs = backend.pass_settings(parse_options(MANUAL), [], CPU)
    uuids = {
        cache_key.identity(backend.pass_settings(parse_options({**MANUAL, **other}), [], CPU))
        for other in OTHERS
        if "buckets" not in other
    }
    assert len(uuids) == len(OTHERS) - 1 and cache_key.identity(specs) not in uuids


def test_sources_are_part_of_the_id(monkeypatch):
    settings = backend.pass_settings(parse_options(MANUAL), [], CPU)
    before = cache_key.identity(settings)
    monkeypatch.setattr(cache_key, "sources", lambda: "others")
    assert cache_key.identity(settings) != before


def test_all_sources_are():
    hashed = {*cache_key.source_files()}
    packages = [Path(p.__file__).parent for p in (simplefsdp, inductor_passes)]
    assert hashed == {file for path in packages for file in path.rglob("*.py")}
    assert packages[0] / "frontend" / "gather.py" in hashed


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_the_scheduler_pass_can_be_pickled(protocol):
    impose_order = ImposeOrder(OverlapPolicy(3, 5), True, "0123456789abcdef")
    pickled = pickle.dumps(impose_order, protocol)
    assert pickle.loads(pickled) == impose_order
    held = [argument for _, argument, _ in pickletools.genops(pickled)]
    assert "0123456789abcdef" in held and 5 in held
    other = ImposeOrder(OverlapPolicy(3, 5), True, "another")
    assert pickle.dumps(other, protocol) != pickled


def one_warm_one_cold():
    """Both ranks compile; then rank 1 loses its cache, and both compile again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with fresh_cache():
        first, cold = compile_and_run(mesh, MANUAL)
        if dist.get_rank() == 0:
            second, found = compile_and_run(mesh, MANUAL)
        else:
            with fresh_cache():
                second, found = compile_and_run(mesh, MANUAL)
    return first, second, cold, found


def test_a_warm_and_a_cold_rank(pools):
    warm, cold = pools(2).run(one_warm_one_cold, timeout=200)
    assert warm[2] == cold[2] == (0, 2)
    assert warm[3] == (2, 0) and cold[3] == (0, 2)
    assert warm[0] == warm[1] == cold[0] == cold[1]  # equal batches, equal losses


def planned(caplog, mesh: DeviceMesh, rows: int, *, grad: bool, **options: object) -> list[str]:
    """What is logged of a compilation of its own for a batch of so many rows."""
    torch._dynamo.reset_code_caches()  # compiles again, and forgets no plan
    caplog.clear()
    run = torch.compile(
        simple_fsdp(Two(), mesh),
        backend="simplefsdp",
        dynamic=False,
        options={"executor": "aot_eager", "cluster": "h100", **options},
    )
    with caplog.at_level("INFO", "simplefsdp"), torch.set_grad_enabled(grad):
        run(torch.ones(rows, WIDTH))
    return [record.getMessage() for record in caplog.records]


def test_an_evaluation_is_planned_apart(fake_mesh, caplog):
    """It frees what a training step keeps, and may communicate the same."""
    mesh = fake_mesh(4)
    for grad in (False, True):
        for again in (False, True):
            found = "".join(planned(caplog, mesh, 2, grad=grad))
            assert "planned" in found and ("planned as before" in found) == again


def test_a_plan_that_is_kept_and_takes_too_much_is_told(fake_mesh, caplog):
    mesh, budget = fake_mesh(4), {"memory_budget_gb": 1e-3}
    assert "memory_budget_gb" not in "".join(planned(caplog, mesh, 2, grad=True, **budget))
    found = "".join(planned(caplog, mesh, 10**6, grad=True, **budget))
    assert "planned as before" in found
    assert (
        "forward graph: planned for another batch or rank" in found
        and "memory_budget_gb=0.001" in found
    )


def test_after_a_reset_nothing_is_as_before(fake_mesh, caplog):
    mesh = fake_mesh(4)
    for again in (False, False):
        assert ("planned as before" in "".join(planned(caplog, mesh, 2, grad=True))) == again
        torch.compiler.reset()
