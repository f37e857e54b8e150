"""The faults' table: a fault is one function, its row is what it should lead to and what it did.

::

    @fault("rank 1, after step 3", "saves, stops all, exit 143", codes={143}, loses=0)
    def sigterm_to_one_rank(scene):
        run = scene.train()
        run.says("step 3/")
        run.kill(signal.SIGTERM, run.ranks()[1])
        return run.end()
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_run import EAGER, End, EndedEarly, Run, Scene

_REFERENCE_STEPS = 16


class Skip(Exception):
    """This machine cannot have this fault; why."""


@dataclass(frozen=True)
class Fault:
    """A row to be."""

    name: str
    where: str  # what was injected, and when
    expected: str  # in words
    inject: Callable[[Scene], End]  # makes the fault and waits for the end
    codes: frozenset[int]  # exit codes that are right
    says: str = ""  # words that the last line must have
    loses: int | None = None  # most steps; None if nothing is trained, or nothing was to be saved
    resumes: bool = False  # whether it goes on afterwards as a run that nothing happened to
    bound_s: float = 60.0  # the longest that it may take to end
    quick: bool = False  # whether the test suite has it, too
    tells_where: bool = False  # whether a traceback is right


@dataclass(frozen=True)
class Outcome:
    """A row: what was expected of a fault, and what came of it.

    ``problems`` is empty if it is as it should be.
    """

    fault: str
    where: str
    expected: str
    outcome: str
    seconds_to_exit: float | None = None
    last_line: str = ""
    lost_steps: int | None = None
    hang: bool = False
    silent_loss: bool = False
    traceback: bool = False
    problems: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def fault(
    where: str, expected: str, *, codes: set[int], **more: Any
) -> Callable[[Callable[[Scene], End]], Callable[[Scene], End]]:
    """Make a function a row of the table; see :class:`Fault`."""

    def register(inject: Callable[[Scene], End]) -> Callable[[Scene], End]:
        add(inject.__name__, inject, where, expected, codes=codes, **more)
        return inject

    return register


def add(
    key: str,
    inject: Callable[[Scene], End],
    where: str,
    expected: str,
    *,
    codes: set[int],
    **more: Any,
) -> None:
    """Add a row to the table, by its name in code."""
    assert key not in FAULTS, f"{key}: there are two faults of that name"
    name = key.replace("_", " ")
    FAULTS[key] = Fault(name, where, expected, inject, frozenset(codes), **more)


_WHO = {"launcher": "launcher", "all": "all processes", 0: "rank 0", 1: "rank 1"}


def signalled(
    key: str,
    who: str | int,
    number: int,
    expected: str,
    *,
    begin: Callable[[Scene], Run],
    when: str,
    **more: Any,
) -> None:
    """Add a row: a run, as ``begin`` leaves it, gets a signal; ``who`` is ``launcher``, ``all`` or
    a rank."""

    def inject(scene: Scene) -> End:
        run = begin(scene)
        if who == "all":
            run.kill_all(number)
        else:
            run.kill(number, *([run.ranks()[who]] if isinstance(who, int) else []))
        return run.end()

    add(key, inject, f"{_WHO[who]}, {when}", expected, **more)


class Table:
    """Makes rows, each in a folder of its own; what nothing happened to is trained once."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.mkdtemp(prefix="simplefsdp-faults-"))
        self._undisturbed: dict[int, float] | None = None

    def row(self, this: Fault) -> Outcome:
        """Make a fault happen, and see what comes of it."""
        scene = Scene(self._folder / this.name.replace(" ", "_"))
        try:
            try:
                end = this.inject(scene)
            except Skip as reason:
                return Outcome(this.name, this.where, this.expected, f"skipped: {reason}")
            except TimeoutError as error:
                return _judge(this, End(-1, str(error), 0.0, hung=True), None, [])
            except (EndedEarly, AssertionError) as error:
                return _judge(this, End(-1, str(error), 0.0), None, ["ended before the fault"])
            lost = self._lost(this, scene, end)
            wrong = self._gone_on(scene) if this.resumes else []
            return _judge(this, end, lost, wrong)
        finally:
            scene.close()

    def _lost(self, this: Fault, scene: Scene, end: End) -> int | None:
        if this.loses is None:
            return None
        done = max(end.step, *scene.losses(), 0)  # it may not have been able to print
        return max(0, done - max(scene.checkpoints(), default=0))

    def _gone_on(self, scene: Scene) -> list[str]:
        """What is wrong when the run is resumed; the losses are those of an undisturbed run."""
        until = max(scene.checkpoints(), default=0) + 2
        resume = ["--resume", "run"] if scene.checkpoints() else ["--resume", "auto"]
        run = scene.train(*resume, "--stop-after", str(until), options=EAGER)
        end = run.end(120)
        if end.code != 0:
            return [f"resuming it ended with {end.code}: {end.last_line}"]
        losses, undisturbed = scene.losses(), self.undisturbed()
        missing = [step for step in range(1, until + 1) if step not in losses]
        other = [
            step for step in losses if step in undisturbed and losses[step] != undisturbed[step]
        ]
        wrong = [f"no metrics of steps {missing[:5]}"] if missing else []
        return wrong + ([f"other losses from step {other[0]}"] if other else [])

    def undisturbed(self) -> dict[int, float]:
        """Losses by step, of a run that nothing happens to."""
        if self._undisturbed is None:
            scene = Scene(self._folder / "undisturbed")
            end = scene.train("--stop-after", str(_REFERENCE_STEPS)).end(180)
            assert end.code == 0, end.text
            self._undisturbed = scene.losses()
            scene.close()
        return self._undisturbed

    def close(self) -> None:
        """Remove all folders."""
        with suppress(OSError):
            self._folder.rmdir()


def _judge(this: Fault, end: End, lost: int | None, wrong: list[str]) -> Outcome:
    problems = ["hangs"] if end.hung or end.seconds > this.bound_s else []
    traceback = "Traceback (most recent call last)" in end.text and not this.tells_where
    problems += ["traceback"] if traceback else []
    if not end.hung and end.code not in this.codes:
        problems.append(f"exit code {end.code}")
    if this.says not in end.last_line:
        problems.append(f"the last line lacks {this.says!r}")
    problems += [f"left behind: {process}" for process in end.left]
    too_many = lost is not None and this.loses is not None and lost > this.loses
    problems += [f"lost {lost} steps"] if too_many else []
    problems += [*end.wrong, *wrong]
    return Outcome(
        fault=this.name,
        where=this.where,
        expected=this.expected,
        outcome="; ".join(problems) or "as expected",
        seconds_to_exit=round(end.seconds, 1),
        last_line=end.last_line,
        lost_steps=lost,
        hang=end.hung or end.seconds > this.bound_s,
        silent_loss=any("other losses" in w or "no metrics" in w for w in wrong),
        traceback=traceback,
        problems=tuple(problems),
    )
