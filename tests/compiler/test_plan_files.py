"""Plans on disk: the same as those that are made, made once, and never needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_plans import Layers, compiled
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

from inductor_passes import rehearsal
from inductor_passes.ir.program import Bucket
from inductor_passes.planner.plan import Plan
from simplefsdp import simple_fsdp
from simplefsdp.compiler import plans
from simplefsdp.compiler.observers import observing
from simplefsdp.rank_guard import decisions

PLAN = Plan((Bucket("a..b", ("one", "two"), 3), Bucket("c", ("three",), -1)), 1.1, 1 / 3, 0.0, 5, 7)


@pytest.fixture(autouse=True)
def empty_cache():
    with fresh_cache():
        yield


def files() -> list[Path]:
    return sorted((Path(cache_dir()) / plans.FOLDER).glob("*"))


def never() -> Plan:
    raise AssertionError("it was made before")


def test_what_was_made_comes_back_whole():
    assert plans.recalled("text", lambda: PLAN) == PLAN
    assert plans.recalled("text", never) == PLAN
    other = dataclasses.replace(PLAN, buckets=())
    assert plans.recalled("another", lambda: other) == other
    assert len(files()) == 2


def test_a_failure_is_not_kept():
    def fail() -> Plan:
        raise ValueError("no schedule fits")

    for _ in range(2):
        with pytest.raises(ValueError, match="no schedule fits"):
            plans.recalled("text", fail)
    assert files() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"buckets": []}', '{"buckets": 3}', "null"])
def test_a_file_that_is_broken_is_written_anew(text):
    plans.recalled("text", lambda: PLAN)
    (file,) = files()
    file.write_text(text)
    assert plans.recalled("text", lambda: PLAN) == PLAN
    assert plans.recalled("text", never) == PLAN


def test_a_name_that_has_changed_is_not_used():
    plans.recalled("text", lambda: PLAN)
    (file,) = files()
    file.write_bytes(file.read_bytes().replace(b'"three"', b'"there"'))
    assert plans.recalled("text", lambda: PLAN) == PLAN
    assert plans.recalled("text", never) == PLAN


def test_a_folder_that_cannot_be_written_costs_time_only():
    Path(cache_dir(), plans.FOLDER).touch()
    for _ in range(2):
        assert plans.recalled("text", lambda: PLAN) == PLAN


def test_without_a_folder_of_caches_it_plans(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/none/below")
    assert plans.recalled("text", lambda: PLAN) == PLAN


@pytest.mark.parametrize("name", ["force_disable_caches", "fx_graph_cache"])
def test_without_caches_nothing_is_kept(name):
    with config.patch({name: name == "force_disable_caches"}):
        assert plans.recalled("text", lambda: PLAN) == PLAN
    assert files() == []


def plans_of(mesh, **options: object) -> list[Plan]:
    """Of forward and backward, as a new process makes them."""
    torch._dynamo.reset()
    decisions().clear()
    seen = []
    run = compiled(simple_fsdp(Layers(), mesh), **{"cluster": "h100", **options})
    with observing(seen.append):
        run(torch.ones(4, 64)).sum().backward()
    return [graph.rehearsal.plan for graph in seen]


@pytest.mark.slow
def test_the_next_process_does_not_plan(fake_mesh, monkeypatch):
    mesh, made = fake_mesh(4), []
    plan_auto = rehearsal.plan_auto

    def counted(*args, **keywords):
        made.append(plan_auto(*args, **keywords))
        return made[-1]

    monkeypatch.setattr(rehearsal, "plan_auto", counted)
    first = plans_of(mesh)
    assert first == made and len(made) == 2
    assert plans_of(mesh) == first and len(made) == 2
    plans_of(mesh, cluster="a100")
    assert len(made) == 4
    plans_of(mesh, memory_budget_gb=1.0)
    assert len(made) == 6
