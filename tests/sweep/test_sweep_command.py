"""``simplefsdp inspect --fit`` and ``--sweep``: what is asked for, refused, and told."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from inductor_passes.ir.cells import CellError
from inductor_passes.machine.cluster import UnknownLinkError
from inductor_passes.machine.cluster_file import as_cluster
from simplefsdp.cli import main
from simplefsdp.inspection.names import nbytes_text, over_text, time_text
from simplefsdp.inspection.options import DESCRIPTION, InspectOptions
from simplefsdp.inspection.sweep_command import _fastest, _largest, _told_options, _variants
from simplefsdp.inspection.sweep_document import pareto, reason
from simplefsdp.launcher.errors import UserError
from simplefsdp.simulation.trace import UntraceableError
from simplefsdp.sweep.axes import cells_of, parse_axes
from simplefsdp.sweep.cells import Cell, CellStep
from simplefsdp.sweep.fit import largest
from simplefsdp.sweep.traces import CellSweep

DEFAULT = Cell(1, 8192, 64)
SMALL = ["--model", "debug", "--layers", "1"]


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        ([], {"batch": (1,), "seq": (8192,), "ranks": (64,)}),
        (["batch=1..16"], {"batch": (1, 2, 4, 8, 16)}),
        (["seq=2k..16k"], {"seq": (2048, 4096, 8192, 16384)}),
        (["batch=2..10:4"], {"batch": (2, 6, 10)}),
        (["batch=3,1,1"], {"batch": (1, 3)}),
        (["seq=2..8:1"], {"seq": (2, 3, 4, 5, 6, 7, 8)}),
        (["batch=3..20", "ranks=8,16..64"], {"batch": (3, 6, 12), "ranks": (8, 16, 32, 64)}),
    ],
)
def test_axes(written, axes):
    found = parse_axes(written, DEFAULT)
    assert found == {name: (size,) for name, size in DEFAULT._asdict().items()} | axes
    cells = cells_of(found)
    assert len(cells) == len(found["batch"]) * len(found["seq"]) * len(found["ranks"])
    assert all(isinstance(cell, Cell) for cell in cells)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (["width=3"], "expected batch=..., seq=..., ranks=..., as in batch=1..16"),
        (["batch"], "expected batch=..."),
        (["batch=1", "batch=2"], "batch is given twice"),
        (["batch=0..4"], "expected a whole number of at least 1, such as 8 or 4k, got '0'"),
        (["seq=2m"], "got '2m'"),
        (["batch=8..2"], "2 is less than 8"),
        (["batch=4:2"], "4:2 counts by 2, from where to where?"),
        (["batch=1..1000000000:1"], "is 1,000,000,000 cells, and a sweep has at most 100,000"),
        (["batch=1..1k:1", "ranks=1..1k:1"], "ranks=1..1k:1: that is 1,048,576 cells"),
        (["batch=1,2000000k"], "batch=1,2000000k: expected at most 1,073,741,824, got 2,048,000,0"),
        (["seq=1,64"], "--sweep seq=1,64: expected a whole number of at least 2"),
        (["seq=1..64"], "at least 2, such as 8 or 4k, got '1'"),
    ],
)
def test_axes_that_are_refused(written, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_axes(written, DEFAULT)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 100, 1000])
@pytest.mark.parametrize("multiple", [1, 8])
def test_the_largest_that_fits(limit, multiple):
    asked = []

    def steps(sizes):
        asked.append(sizes)
        assert all(size % multiple == 0 for size in sizes)
        return [CellStep(Cell(n, 1, 1), 1, 0, 1, 0, n, limit * multiple) for n in sizes]

    fits, not_ = largest(steps, 1000 * multiple, multiple)
    assert (fits.cell.batch if fits else 0) == limit * multiple
    assert (not_.cell.batch if not_ else None) == (
        None if limit == 1000 else (limit + 1) * multiple
    )
    assert len(asked) <= 4


def test_the_front_is_of_what_fits_by_sequence():
    def row(seq: int, each: float, ranks: int, fits: bool = True) -> dict[str, object]:
        return {
            "seq": seq,
            "fits": fits,
            "tokens_per_second_per_rank": each,
            "tokens_per_second": each * ranks,
        }

    rows = [row(1, 10, 8), row(1, 9, 16), row(1, 8, 16), row(1, 99, 64, False), row(2, 3, 8)]
    assert sorted(pareto(rows)) == [0, 1, 4]


@pytest.mark.slow
def test_ranks_that_cannot_be_laid_out_are_left_out(tmp_path, capsys):
    """And spoil no other cell."""
    written = tmp_path / "cells.json"
    sweep = ["--sweep", "batch=3", "seq=64", "ranks=3,4", "--tp", "2", *SMALL]
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *sweep, "--json", str(written)])
    assert stopped.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: ranks 3: --tp 2 does not divide 3 ranks" in told
    assert [cell["ranks"] for cell in json.loads(written.read_text())["cells"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sweep", "ranks=3,5", *SMALL, "--tp", "2"], "--tp 2 does not divide 3 ranks"),
        (["--fit", "--sweep", "batch=1..2", *SMALL], "give one of --fit and --sweep"),
        (["--fit", *SMALL, "--batch-size", "3"], "--batch-size does not go together with --fit"),
        (["--fit", "seq", *SMALL, "--seq-len", "64"], "--seq-len does not go together with --fit"),
        (["--sweep", "batch=x", *SMALL], "expected a whole number of at least 1"),
        (["--sweep", "seq=4k", *SMALL], "seq 4096 is longer than debug takes (2048)"),
        (["--sweep", "batch=1", *SMALL, "--perfetto", "x"], "--perfetto does not go together"),
        (["--fit", *SMALL, "--bucketing", "greedy"], "plan by one of auto, manual, none"),
        (["--hf", "config.json"], "--hf belongs to --fit or --sweep"),
        (["--fit", "--hf", "nowhere"], "--hf nowhere: there is no such file or folder"),
        (["--sweep", "seq=4", "--hf", "nowhere"], "--hf nowhere: there is no such file or folder"),
        (
            ["--sweep", "seq=4", "--hf", "x", "--activation-checkpointing", "selective"],
            "selective: models of transformers recompute",
        ),
        (
            ["--fit", "--target", "a:b", "--input", "a:c", "--activation-checkpointing", "none"],
            "--activation-checkpointing belongs to --model",
        ),
        (
            ["--target", "a:b", "--input", "a:c", "--activation-checkpointing", "selective"],
            "--activation-checkpointing belongs to --model",
        ),
    ],
)
def test_what_is_refused(arguments, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    assert stopped.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_folder_without_a_configuration_is_looked_for_on_no_server(monkeypatch, capsys, tmp_path):
    pytest.importorskip("transformers")
    asked: list[str] = []

    def getaddrinfo(host, *_, **__):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    with pytest.raises(SystemExit):
        main(["inspect", "--fit", "--hf", str(tmp_path)])
    assert "no configuration of a language model" in " ".join(capsys.readouterr().err.split())
    assert asked == []


def refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    assert stopped.value.code == 0


@pytest.mark.slow
def test_the_largest_batch(capsys, tmp_path: Path, monkeypatch):
    """As the help shows it."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "fit.json"
    (example,) = re.findall(r"^  simplefsdp (inspect --fit .*)$", DESCRIPTION, re.MULTILINE)
    run(*example.split(), "--json", str(path))
    out = " ".join(capsys.readouterr().out.split())
    assert "largest batch" in out and "of which 72 GB are taken to be usable" in out
    rows = json.loads(path.read_text())["fit"]
    assert [row["activation_checkpointing"] for row in rows[::2]] == ["none", "selective", "full"]
    assert len(re.findall(r"\d [kMG]?B over", out)) == len(rows)
    for row in rows:
        fits, more = row["largest"], row["next"]
        assert fits["fits"] and not more["fits"]
        assert more["batch"] == fits["batch"] + 1
        assert fits["peak_bytes"] <= fits["room_bytes"] < more["peak_bytes"]


def test_without_transformers(monkeypatch, tmp_path: Path, capsys):
    """The README's installation has it not."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["inspect", "--fit", "--hf", str(tmp_path)])
    assert f"--hf {tmp_path}: needs transformers: pip install transformers" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("given", "neighbours"),
    [
        ({"ranks": 64}, [8]),
        ({"ranks": 8}, []),  # one node
        ({"ranks": 12}, []),  # 8 do not divide them
        ({"ranks": 64, "tp": 2}, [4]),
        ({"ranks": 64, "tp": 8}, []),
        ({"ranks": 64, "mode": "hybrid_shard"}, []),
        ({"ranks": 64, "mode": "hybrid_shard", "shard_size": 16}, [8]),
        ({"ranks": 64, "mode": "replicate"}, []),
    ],
)
def test_what_is_kept_for_the_largest(given, neighbours):
    """All of each parameter, none of it, and its part of a node's ranks if there are several."""
    options = InspectOptions(model="debug", fit="batch", **given)
    kept = [
        (each.reshard_after_forward, each.post_forward_ranks)
        for each in _variants(options, as_cluster("h100"))
        if each.activation_checkpointing == "none"
    ]
    assert kept == [(True, None), *((True, n) for n in neighbours), (False, None)]


def test_a_sweep(capsys, tmp_path: Path):
    path = tmp_path / "sweep.json"
    axes = ["batch=1..4", "seq=64..128", "ranks=4,8"]
    run("inspect", "--sweep", *axes, *SMALL, "--json", str(path))
    assert "12 of 12 cells fit; 1 trace." in " ".join(capsys.readouterr().out.split())
    found = json.loads(path.read_text())
    assert found["axes"] == {"batch": [1, 2, 4], "seq": [64, 128], "ranks": [4, 8]}
    assert len(found["cells"]) == 12
    assert any(cell["pareto"] for cell in found["cells"])
    for cell in found["cells"]:
        assert 0 < cell["mfu"] < 1
        assert cell["binds"] in ("wire", "compute")
        assert cell["reason"]


def test_the_table_has_a_row_for_each_number_of_ranks():
    """Also where more ranks are faster for each, and where nothing fits."""
    cell = {"exposed_share": 0.0, "step_us": 1.0, "mfu": 0.5, "binds": "wire", "seq": 64}
    cells = [
        {**cell, "ranks": ranks, "batch": batch, "fits": fits, "peak_bytes": 1e9 * batch}
        | {"tokens_per_second": speed * ranks, "tokens_per_second_per_rank": speed}
        for ranks, batch, fits, speed in (
            *((2, 4, False, 9.0), (2, 2, False, 8.0), (4, 1, True, 5.0)),
            *((4, 2, True, 7.0), (4, 4, False, 9.0), (8, 1, True, 8.0)),
        )
    ]
    table = _fastest({"name": "m", "cluster": "c", "cells": cells})
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["ranks"] == ["2", "4", "8"]
    assert columns["batch"] == ["2", "2", "1"]
    assert columns["tokens/s"] == ["-", "28", "64"]
    assert columns["binds"] == ["does not fit", "wire", "wire"]


@pytest.mark.slow
def test_a_model_of_transformers(capsys, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(tmp_path)
    path = tmp_path / "sweep.json"
    arguments = ["--sweep", "batch=1..4", "seq=64,128", "--ranks", "4", "--hf", str(tmp_path)]
    recomputed = ["--activation-checkpointing", "full"]
    run("inspect", *arguments, *recomputed, "--json", str(path))
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 6 and all(cell["fits"] for cell in cells)
    assert capsys.readouterr().out


def test_what_a_model_recomputes_by_default():
    """Ours a part of each block; those of transformers have no such thing."""
    assert _told_options(InspectOptions(model="debug"))["activation_checkpointing"] == "selective"
    assert _told_options(InspectOptions(hf=Path("x")))["activation_checkpointing"] == "none"
    given = InspectOptions(hf=Path("x"), activation_checkpointing="full")
    assert _told_options(given)["activation_checkpointing"] == "full"


def test_help_names_only_choices_that_can_be_given(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert "''" not in capsys.readouterr().out


def test_what_does_not_fit_is_told_with_by_how_much():
    """Both sizes round to 72 GB."""
    assert over_text(72_010_000_000, 72_000_000_000) == "72 GB, 10 MB over"
    step = CellStep(DEFAULT, 1, 0, 1, 0, 72_010_000_000, 72_000_000_000)
    assert reason(step) == "does not fit: it takes 72 GB, 10 MB over what a device has"


def test_sizes_just_below_a_unit_have_no_exponent():
    assert (nbytes_text(999_600_000), time_text(999.7)) == ("1,000 MB", "1,000 us")
    assert (nbytes_text(999_400_000), time_text(2.5e9)) == ("999 MB", "2,500 s")


@pytest.mark.slow
def test_a_model_of_the_users(capsys, tmp_path: Path):
    """Its function decides what is recomputed and kept: nobody here knows."""
    path = tmp_path / "fit.json"
    example = "simplefsdp.inspection.example"
    target = ["--target", f"{example}:build_model", "--input", f"{example}:example_batch"]
    run("inspect", "--fit", *target, "--ranks", "4", "--json", str(path))
    (row,) = json.loads(path.read_text())["fit"]
    assert row["largest"]["batch"] > 1
    assert row["activation_checkpointing"] is row["reshard_after_forward"] is None
    out = capsys.readouterr().out
    assert not re.search("selective|fully_shard|bf16|yes|no |none", out.replace("nothing", ""))


@pytest.mark.slow
def test_all_ways_are_fitted_by_two_processes(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    path = tmp_path / "fit.json"
    run("inspect", "--fit", *SMALL, "--ranks", "4", "--json", str(path))
    rows = json.loads(path.read_text())["fit"]
    ways = [(row["activation_checkpointing"], row["reshard_after_forward"]) for row in rows]
    assert ways == [
        (way, again) for way in ("none", "selective", "full") for again in (True, False)
    ]
    assert all(row["largest"]["batch"] > 1 for row in rows)
    told = capsys.readouterr()
    assert told.err.count("done: recomputing") == 6 and "debug, 6 ways to train it" in told.err
    assert "selective" in told.out


def test_a_sweep_of_the_users_model_claims_none_of_our_options():
    assert not any(_told_options(InspectOptions(target="a:b", input="a:c")).values())
    assert _told_options(InspectOptions(model="debug"))["mode"] == "fully_shard"


def test_a_model_of_sequences_below_128_has_a_longest_one():
    def steps(cells):
        return [CellStep(cell, 1, 0, 1, 0, 1, 1) for cell in cells]

    sweep = SimpleNamespace(model=SimpleNamespace(longest=64, tracing=nullcontext), steps=steps)
    fits, more = _largest(InspectOptions(fit="seq"), sweep, Cell(1, 64, 8))
    assert fits.cell == Cell(1, 64, 8) and more is None


@pytest.mark.parametrize("asked", [["--fit"], ["--sweep", "batch=1"]])
def test_a_defect_keeps_its_traceback(monkeypatch, asked):
    def steps(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(CellSweep, "steps", steps)
    with pytest.raises(ValueError, match="a defect") as raised:
        main(["inspect", *asked, *SMALL])
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("asked", [["--fit"], ["--sweep", "batch=1"]])
@pytest.mark.parametrize("error", [CellError, UntraceableError, UnknownLinkError])
def test_what_a_model_or_a_cluster_lacks_is_one_line(monkeypatch, capsys, asked, error):
    def steps(*_):
        raise error("what it lacks")

    monkeypatch.setattr(CellSweep, "steps", steps)
    refused(["inspect", *asked, *SMALL])
    _doing, *error_lines = capsys.readouterr().err.splitlines()
    assert error_lines == ["error: what it lacks"]


def test_a_model_that_cannot_be_split_so_is_one_line(capsys):
    refused(["inspect", "--fit", *SMALL, "--ranks", "10", "--tp", "5"])
    assert "does not divide among 5 tensor-parallel ranks" in capsys.readouterr().err


MODELS = """
import torch
from torch import nn
from simplefsdp import simple_fsdp

class Breaks(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)

def breaks(mesh): return simple_fsdp(Breaks(4, 1), mesh)
def narrow(mesh): return simple_fsdp(nn.Linear(3, 1), mesh)
def unwrapped(): return nn.Linear(4, 1)
def inputs(): return torch.ones(2, 4)
"""


@pytest.mark.parametrize(
    ("build", "told"),
    [
        ("breaks", "breaks: graph break at"),
        ("narrow", "narrow: forward failed with what --input of_users:inputs returned"),
        ("unwrapped", "unwrapped: model: no parameter of this Linear is sharded"),
    ],
)
def test_a_model_of_the_users_that_cannot_be_traced(monkeypatch, capsys, tmp_path, build, told):
    (tmp_path / "of_users.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    refused(["inspect", "--fit", "--target", f"of_users:{build}", "--input", "of_users:inputs"])
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: --target of_users:{told}")
