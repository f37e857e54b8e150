"""Puts the benchmarks on the path, and prints the faults' table at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: starts a training run and disturbs it")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    rows = [dict(report.user_properties) for report in reports if report.user_properties]
    for row in (row for row in rows if "fault" in row):
        terminalreporter.write_line(
            f"{row['fault']} ({row['where']}): {row['outcome']}, {row['seconds_to_exit']} s, "
            f"lost {row['lost_steps']}: {row['last_line']}"
        )
