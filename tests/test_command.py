"""Passes run from the shell on a program in text form."""

from __future__ import annotations

import subprocess
import sys

import pytest
from programs import layers

from inductor_passes.__main__ import main
from inductor_passes.ir.text import parse


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.txt"
    path.write_text(layers(6, "backward"))
    return str(path)


def sections(printed: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for line in printed.splitlines(keepends=True):
        if line.strip() in ("# merge", "# auto", "# order", "# simulate"):
            current = found.setdefault(line.strip()[2:], [])
        else:
            current.append(line)
    return {name: "".join(lines) for name, lines in found.items()}


def exposed(text: str) -> float:
    return float(text.splitlines()[-1].partition("), ")[2].split()[0])


@pytest.mark.parametrize("cluster", [[], ["--cluster", "h100"]])
def test_each_pass_prints_a_program_that_can_be_read_again(program, capsys, cluster):
    assert main([program, "-p", "simulate", *cluster]) == 0
    before = sections(capsys.readouterr().out)["simulate"]
    assert before.count(", exposed ") == 12
    assert main([program, *cluster]) == 0
    after = sections(capsys.readouterr().out)
    assert [*after] == ["merge", "order", "simulate"]
    merged, ordered = (parse(after[name]) for name in ("merge", "order"))
    assert {op.name for op in merged.ops} == {op.name for op in ordered.ops}
    assert merged.ops != ordered.ops
    assert exposed(after["simulate"]) < exposed(before)


def test_the_planners_buckets(program, capsys):
    main([program, "-p", "auto,order,simulate"])
    found = sections(capsys.readouterr().out)
    sent = [op.collective for _, op in parse(found["auto"]).starts()]
    assert len(sent) < 12 and all(c.bucket for c in sent)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "merge,ordre"], "--passes: there is no 'ordre'; expected of merge, auto"),
        (["--cluster", "h10"], "cluster: "),
    ],
)
def test_bad_input_is_one_line(program, capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        main([program, *arguments])
    assert says in capsys.readouterr().err


def test_a_program_that_is_none():
    done = subprocess.run(
        [sys.executable, "-m", "inductor_passes", "-"],
        input="compute mm(x) -> y: 64\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr
