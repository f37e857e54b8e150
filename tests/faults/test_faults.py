"""A few rows of ``benchmarks/faults.py``, the quick ones: all of them must be as expected."""

from __future__ import annotations

import dataclasses
import sys

import faults  # noqa: F401  (its rows)
import pytest
from faults_rows import FAULTS, Fault, Table, fault
from faults_run import End, EndedEarly

QUICK = [name for name, this in FAULTS.items() if this.quick]


@pytest.mark.slow(quick=["no_room_for_a_checkpoint"])
@pytest.mark.faults
@pytest.mark.ranks
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_ends_as_it_should(name, tmp_path, record_property):
    # What a resumed run does is seen by the benchmark, and by tests of checkpoints.
    row = Table(tmp_path).row(dataclasses.replace(FAULTS[name], resumes=False))
    for key, value in dataclasses.asdict(row).items():
        record_property(key, value)
    if row.outcome.startswith("skipped"):
        pytest.skip(row.outcome)
    assert not row.problems, row


def row_of(inject, tmp_path, **expected):
    """The row of a fault that starts nothing."""
    fault("nowhere", "exit 0", codes={0}, **expected)(inject)
    made: Fault = FAULTS.pop(inject.__name__)
    return Table(tmp_path).row(made)


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (End(0, "done", 1.0), ""),
        (End(1, "done", 1.0), "exit code 1"),
        (End(0, "Traceback (most recent call last):\ndone", 1.0), "traceback"),
        (End(0, "done", 100.0), "hangs"),
        (End(-9, "done", 1.0, hung=True), "hangs"),
        (End(0, "done", 1.0, left=["7 python"]), "left behind: 7 python"),
        (End(0, "done\n\n", 1.0, step=9), "lost 9 steps"),
        (End(0, "other", 1.0), "the last line lacks 'done'"),
        (End(0, "done", 1.0).expect(False, "no file"), "no file"),
    ],
)
def test_a_row_tells_what_is_wrong(end, problem, tmp_path):
    def made_up(scene):
        return end

    row = row_of(made_up, tmp_path, says="done", loses=2)
    assert row.outcome == (problem or "as expected")
    assert row.hang == ("hangs" in problem) and row.traceback == (problem == "traceback")


def test_a_run_that_ends_before_its_fault_is_told(tmp_path):
    def ends_early(scene):
        raise EndedEarly("said nothing")

    assert "ended before the fault" in row_of(ends_early, tmp_path).outcome


def test_the_table_has_every_kind_of_fault():
    kinds = ("disk", "files", "hosts", "limits", "ranks", "saves", "signals")
    imported = {f"faults_{kind}" for kind in kinds}
    assert imported <= sys.modules.keys() and len(FAULTS) == 91
    wanted = {"disk_fills", "cluster_nested_deeply", "float8_parameter", "sighup"}
    assert wanted <= set(QUICK) and len(QUICK) >= 6


@pytest.mark.parametrize("tells_where", [False, True])
def test_a_traceback_is_right_where_it_tells_where_a_rank_hangs(tells_where, tmp_path):
    def made_up(scene):
        return End(0, "Traceback (most recent call last):\ndone", 1.0)

    assert row_of(made_up, tmp_path, tells_where=tells_where).traceback != tells_where
