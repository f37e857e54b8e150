"""``simplefsdp inspect``: what it prints and writes, and what it says to bad input."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inductor_passes.ir.text import parse
from inductor_passes.machine.presets import preset
from simplefsdp.cli import main
from simplefsdp.inspection import options
from simplefsdp.inspection.explain import Reason
from simplefsdp.inspection.report import BY_CONFIG, BY_TRACE
from simplefsdp.models import CONFIGS, flops_per_token

EXAMPLE = (
    "--target simplefsdp.inspection.example:build_model "
    "--input simplefsdp.inspection.example:example_batch"
)
MINE = """
import torch
from torch import nn
from simplefsdp import simple_fsdp


class Breaks(nn.Linear):
    def forward(self, x):
        print("a graph break")
        return super().forward(x)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def unwrapped():
    return nn.Linear(4, 4)


def breaks(mesh):
    return simple_fsdp(Breaks(4, 4), mesh)


def pair(mesh):
    return simple_fsdp(Pair(4, 4), mesh)


def fails():
    raise KeyError("no such layer")


def nothing():
    return None


def batch():
    return torch.randn(2, 4)


def by_name():
    return {"x": torch.randn(2, 4)}


def wrong_batch():
    return torch.randn(2, 5)
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine_to_inspect.py").write_text(MINE)


def run(arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *shlex.split(arguments)])
    return int(exit_.value.code or 0)


@pytest.mark.slow
def test_a_model_of_the_users(capsys):
    files = "--json report.json --graph graphs.txt --diff"
    assert run(f"{EXAMPLE} --ranks 8 --bucketing manual --compare none {files}") == 0
    printed = capsys.readouterr()
    assert "tracing simplefsdp.inspection.example:build_model as one of 8 ranks" in printed.err
    assert "gather 1.0.* (2): 2 gathers merged; start 7 compute ops earlier" in printed.out
    report = json.loads(Path("report.json").read_text())
    manual, none = report["plans"]
    assert (manual["name"], none["name"]) == ("manual", "none")
    assert manual["step_lower_bound_us"] <= manual["step_us"] < none["step_us"]
    assert (manual["tokens_per_second_per_rank"], report["ranks"]) == (None, 8)
    assert 0 < none["mfu"] < manual["mfu"] < 1
    # 4096 rows by 4 layers of 2048 x 2048 and one of 2048, 2 + 4 operations each.
    assert manual["model_flops"] == 6 * 4096 * (4 * 2048**2 + 2048)
    assert manual["model_flops_are"] == BY_TRACE
    for plan in report["plans"]:
        assert [graph["name"] for graph in plan["graphs"]] == ["forward", "backward"]
        for graph in plan["graphs"]:
            check_graph(graph)
    assert [len(plan["graphs"][0]["buckets"]) for plan in (manual, none)] == [5, 10]
    assert {b["reason"] for b in none["graphs"][0]["buckets"]} <= {
        "first use",
        "prefetch limit",
        "wire-bound",
    }
    before, after = Path("graphs.txt").read_text().split("# backward")[0].split("# after")
    assert (before.count(" | gather"), after.count(" | gather")) == (10, 5)
    parse(before.split("\n", 2)[2])


@pytest.mark.slow
def test_torchs_own_passes(capsys):
    """On 2.13 each carries every parameter once; an older torch says what it lacks."""
    names = ("torch-auto", "torch-manual")
    files = "--json report.json --perfetto trace.json --graph graphs.txt --html page.html --diff"
    code = run(f"{EXAMPLE} --ranks 8 --bucketing torch-auto --compare torch-manual none {files}")
    printed = capsys.readouterr()
    if torch.__version__ < "2.13":
        assert code == 2
        assert re.search(r"torch 2\.1\S+ has no .* of schedule_overlap_bucketing", printed.err)
        return
    assert code == 0
    *plans, none = json.loads(Path("report.json").read_text())["plans"]
    assert tuple(plan["name"] for plan in plans) == names
    for plan in plans:
        assert none["step_lower_bound_us"] <= plan["step_us"] < none["step_us"]
        for graph, was in zip(plan["graphs"], none["graphs"], strict=True):
            check_graph(graph)
            assert len(graph["buckets"]) < len(was["buckets"])
            assert graph["pass_seconds"] > 0
            for kind in ("gather", "reduce"):
                carried, single = (
                    sorted(p for b in g["buckets"] if b["kind"] == kind for p in b["parameters"])
                    for g in (graph, was)
                )
                assert carried == single
    assert "gathers merged" in printed.out and "reduces merged" in printed.out
    assert "nothing moves it" in str(none) and "nothing moves it" not in str(plans)
    parse(Path("graphs.txt").read_text().split("# backward")[0].split("# after the passes\n")[1])
    assert run("--trace trace.json") == 0


def test_a_pass_of_torchs_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing",
        lambda gm, module_bucket_plans: gm,
    )
    assert run(f"{EXAMPLE} --bucketing torch-manual") == 2
    said = "has no insert_overlap_deps, module_stack_fn of manual_overlap_bucketing, which this"
    assert said in capsys.readouterr().err


def check_graph(graph):
    exposed = [bucket["exposed_us"] for bucket in graph["buckets"]]
    assert sum(exposed) == pytest.approx(graph["exposed_us"])
    assert sum(graph["exposed_by_reason"].values()) == pytest.approx(graph["exposed_us"])
    computed = graph["compute_us"] + graph["slowed_us"]
    assert graph["total_us"] == pytest.approx(computed + graph["exposed_us"])
    assert graph["peak_bytes"] >= sum(graph["peak_by_kind"].values())
    assert sum(graph["peak_by_kind"].values()) == sum(graph["peak_by_module"].values())
    for bucket in graph["buckets"]:
        assert (bucket["reason"] in Reason.__args__) == (bucket["exposed_us"] > 1e-6)


@pytest.mark.slow
def test_a_model_of_ours(capsys):
    options = "--model debug --layers 1 --seq-len 16 --ranks 4 --tp 2 --cluster cpu-gloo"
    assert run(f"{options} --json report.json") == 0
    out = capsys.readouterr().out
    (plan,) = json.loads(Path("report.json").read_text())["plans"]
    config = replace(CONFIGS["debug"], n_layers=1)
    assert plan["model_flops"] == 16 / 2 * flops_per_token(config, 16)  # as the trainer counts
    peak = preset("cpu-gloo").peak("bfloat16").tflops
    assert plan["mfu"] == pytest.approx(plan["model_flops"] / plan["step_us"] / peak / 1e6)
    assert f"MFU counts operations: {BY_CONFIG}" in out
    assert "debug on 4 ranks of cpu-gloo" in out
    rows = [line for line in out.splitlines() if line.startswith(("│gather", "│reduce", "│other"))]
    assert len(rows) == sum(int(n) for n in re.findall(r"-> (\d+) bucket", out)) >= 4
    assert "layers.0" in out and "by module: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "give one of --model NAME, --target module:function, --hf"),
        (f"--model debug {EXAMPLE}", "give one of --model NAME, --target module:function, --hf"),
        ("--target a:b", "go together"),
        ("--model debug --trace trace.json", "give one of --model NAME"),
        ("--trace trace.json --html page.html", "--html belongs to a prediction"),
        ("--trace missing.json", "--trace missing.json: there is no such file; expected the JSON"),
        ("--model debug --layers 0", "--layers must be at least 1, got 0"),
        ("--model 9b", "unknown --model '9b': choose one of debug, 160m, 1b, 8b, 70b, 405b"),
        ("--model debug --cluster h1000", "there is no preset 'h1000'"),
        ("--model debug --ranks 1", "--ranks must be at least 2, got 1"),
        ("--model debug --seq-len 4096", "longer than --model debug takes"),
        ("--model debug --tp 3", "--tp 3 does not divide 8 ranks"),
        ("--model debug --shard-size 2", "belongs to --mode hybrid_shard"),
        ("--model debug --bucketing none --memory-budget-gb 1", "belongs to --bucketing auto"),
        ("--model debug --buckets layers.*", "--buckets belongs to --bucketing manual"),
        ("--model debug --json missing/report.json", "there is no folder missing"),
        (f"{EXAMPLE} --layers 2", "--layers belongs to --model"),
        ("--target nowhere:f --input nowhere:g", "cannot import nowhere"),
        ("--target mine_to_inspect --input a:b", "expected module:function"),
        ("--target mine_to_inspect:built --input a:b", "its functions are batch, breaks, by_name"),
    ],
)
def test_bad_options(capsys, arguments, said):
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "batch", "said"),
    [
        ("unwrapped", "batch", "no parameter of this Linear is sharded; wrap it by"),
        ("breaks", "batch", 'mine_to_inspect.py:9 (print("a graph break")): the whole model must'),
        ("fails", "batch", "failed: KeyError: 'no such layer'"),
        ("nothing", "batch", "returned NoneType; it must return the wrapped model"),
        ("breaks", "absent", "has no function absent"),
        ("pair", "wrong_batch", "forward failed with what --input mine_to_inspect:wrong_batch"),
    ],
)
def test_bad_targets(capsys, build, batch, said):
    assert run(f"--target mine_to_inspect:{build} --input mine_to_inspect:{batch}") == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_inputs_by_name(capsys):
    assert run("--target mine_to_inspect:pair --input mine_to_inspect:by_name") == 0
    assert "mine_to_inspect:pair on 8 ranks" in capsys.readouterr().out


def test_buckets_of_the_users(tmp_path, capsys):
    """As ``options["buckets"]``: those that + joins share one."""
    shown = tmp_path / "shown.json"
    model = "--model debug --layers 2 --seq-len 64 --bucketing manual --buckets"
    assert run(f"{model} layers.*.mlp norm+embed_tokens --json {shown}") == 0
    forward = json.loads(shown.read_text())["plans"][0]["graphs"][0]
    assert {"layers.0.mlp", "layers.1.mlp", "norm+embed_tokens"} <= {
        bucket["label"] for bucket in forward["buckets"]
    }
    assert run(f"{model} layers.7") == 2
    assert "buckets: 'layers.7' matches no module" in capsys.readouterr().err


@pytest.mark.slow
def test_a_budget_that_nothing_fits(capsys):
    assert run(f"{EXAMPLE} --memory-budget-gb 0.001") == 2
    assert "memory budget: no schedule fits 1,000,000 bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_machine_averages_or_not(tmp_path):
    """On a GPU NCCL does; on a CPU gradients are summed, and divided by kernels of their own."""
    reduces = {}
    for cluster in ("cpu-gloo", "h100"):
        file = tmp_path / cluster
        assert run(f"{EXAMPLE} --cluster {cluster} --graph {file}") == 0
        reduces[cluster] = set(re.findall(r"reduce\w* .*?\b(sum|avg)\b", file.read_text()))
    assert reduces == {"cpu-gloo": {"sum"}, "h100": {"avg"}}


@pytest.mark.slow
def test_every_example_of_the_help_runs(capsys):
    """In their order: --trace reads what --perfetto wrote. That of --fit: test_sweep_command.py."""
    examples = re.findall(r"^  simplefsdp inspect (.*)$", options.DESCRIPTION, re.MULTILINE)
    assert len(examples) >= 7
    for example in (each for each in examples if not each.startswith("--fit ")):
        torch._dynamo.reset()
        code = run(example)
        said = capsys.readouterr()
        if "torch-auto" in example and torch.__version__ < "2.13":
            assert code == 2 and "of schedule_overlap_bucketing, which this plan needs" in said.err
            continue
        assert code == 0, f"{example}: {said.err}"
        assert "exposed" in said.out
        for name in re.findall(r"--(?:json|graph|html|perfetto) (\S+)", example):
            assert Path(name).stat().st_size > 1000
            assert f"wrote {name}" in said.out
