"""Errors that need no traceback, because one line on the terminal says everything."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class UserError(ValueError):
    """Bad input: exit code 2. The message names the input, what was expected, what was given, and
    the remedy."""


class RunFailed(RuntimeError):
    """The run cannot go on, through no defect of the program: exit code 1."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn the ValueErrors and OSErrors of a validation phase into :class:`UserError`.

    Only code that checks input belongs inside. A ValueError from any other code is a defect, and
    keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


# Messages of gloo, NCCL and the store about a rank that has ended.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "remote process exited",
    "Software caused connection abort",
)
# Message of gloo if no rank has ended, but no answer comes.
_NO_ANSWER = "Timed out waiting"
# Messages of Python, the library loader and torch about a resource that is used up.
_USED_UP = (
    "can't start new thread",
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "out of memory",
    "MemoryError",
    "failed to map segment",
)
_USED_UP_ERRNOS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective timed out. The traceback then says which one."""
    return isinstance(error, RuntimeError) and _NO_ANSWER in str(error)


def in_one_line(error: BaseException) -> str | None:
    """One line on an error that a traceback alone would not explain; None for other errors.

    If another rank is gone, only that is known here; that rank, or the launcher that saw it end,
    says why. If memory or open files are used up, the line of code that failed says nothing.
    """
    text = str(error)
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.errno in _USED_UP_ERRNOS:
        return f"this machine, or this process by its limits (ulimit), has no more of it: {text}"
    if not isinstance(error, (RuntimeError, ImportError)):
        return None
    if sign := next((words for words in _GONE if words in text), None):
        return f"lost another rank in the middle of a collective ({sign})"
    if is_timeout(error):
        waited = text[text.index(_NO_ANSWER) :].splitlines()[0]
        return (
            f"no answer from another rank in a collective ({waited}): it hangs, cannot be reached, "
            "or is in another collective; the traceback says in which this one was"
        )
    lines = [line for line in text.splitlines() if any(words in line for words in _USED_UP)]
    return f"out of memory, or near it: {lines[0].strip(' :')}" if lines else None


def record_failure(error: BaseException) -> None:
    """Write this rank's error to torchrun's error file, where the launcher looks for it.

    The file is there whole or not at all: the launcher, which may end this rank meanwhile, since
    another one was killed, cannot read half a file.
    """
    file = os.environ.get(_ERROR_FILE)
    if file is None:
        return
    # It may be torch that could not be imported, or a disk that is full.
    with suppress(ImportError, OSError):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        os.environ[_ERROR_FILE] = f"{file}.part"
        try:
            get_error_handler().record_exception(error)
            os.replace(f"{file}.part", file)
        finally:
            os.environ[_ERROR_FILE] = file


def leave_at_once(code: int) -> NoReturn:
    """End a rank without waiting for its threads, except one that runs g++.

    If the rank failed, a thread may be writing a checkpoint together with ranks that are gone, or
    that wait for this rank to end. And gloo's threads abort a process that exits normally, which
    would hide the reason of the failure.
    """
    if "simplefsdp._torch.cpp" in sys.modules:  # else it may be torch that could not be imported
        from simplefsdp._torch.cpp import let_compiler_finish

        let_compiler_finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
