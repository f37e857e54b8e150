"""The ``simplefsdp`` command: one subcommand per job.

A subcommand is a module with ``run(args) -> exit code``. The module is imported only when its
subcommand is called, and reads its own options. It does not import torch, which takes seconds, so
help and error messages about options appear at once.
"""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import NoReturn

from simplefsdp.launcher.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    RunFailed,
    UserError,
    in_one_line,
    is_timeout,
    leave_at_once,
    record_failure,
)
from simplefsdp.launcher.follow import under_torchrun
from simplefsdp.launcher.output import unbroken_output

COMMANDS = {
    "train": ("simplefsdp.train.command", "train a Llama 3 on text"),
    "export": ("simplefsdp.train.export", "write a checkpoint as safetensors, for transformers"),
    "verify": ("simplefsdp.train.verify", "see whether a checkpoint is as it was written"),
    "calibrate": ("simplefsdp.calibrate.command", "measure this machine, for the planner"),
    "inspect": (
        "simplefsdp.inspection.command",
        "see what is merged, when it runs, what is exposed and why",
    ),
}


@unbroken_output()
def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input, 128 + n ended by signal n."""
    args = list(sys.argv[1:] if argv is None else argv)
    code = 0
    try:
        code = _dispatch(args)
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        record_failure(error)
        code = EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        record_failure(error)
        line = in_one_line(error)
        if line is None and not under_torchrun():
            raise
        if line is None or is_timeout(error):
            sys.excepthook(type(error), error, error.__traceback__)
        if line is not None:
            print(f"error: {line}", file=sys.stderr)
        code = EXIT_FAILED
    if code and under_torchrun():
        leave_at_once(code)
    sys.exit(code)


def main_of_rank() -> NoReturn:
    """:func:`main` of a rank that ``simplefsdp`` has started.

    On CPU the process exits at once: Python's normal exit would go through all compiled graphs once
    more, for a second or two. On CUDA it exits normally, as a profiler may still have to write."""
    with suppress(ImportError):
        from tqdm import tqdm

        # Inductor's bars need no lock between processes: Python would say that it was leaked.
        tqdm.set_lock(RLock())
    try:
        main()
    except SystemExit as left:
        from simplefsdp.launcher.ranks import device_type

        if device_type() == "cpu":
            leave_at_once(int(left.code or 0))
        raise


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if args[0] == "--version":
        from simplefsdp.version import __version__

        print(f"simplefsdp {__version__}")
        return 0
    if args[0] not in COMMANDS:
        raise UserError(f"unknown command {args[0]!r}: choose one of {', '.join(COMMANDS)}")
    return int(importlib.import_module(COMMANDS[args[0]][0]).run(args[1:]))


def _usage() -> str:
    lines = ["usage: simplefsdp COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "simplefsdp COMMAND --help describes the options of a command."]
    return "\n".join(lines)
