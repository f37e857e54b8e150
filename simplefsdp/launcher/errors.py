"""Errors that need no traceback: one line on the terminal says all."""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class UserError(ValueError):
    """Bad input: exit code 2. Names the thing, what was expected, what came, and the remedy."""


class RunFailed(RuntimeError):
    """The run cannot go on, through no defect of the program: exit code 1."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn the ValueErrors and OSErrors of a validation phase into :class:`UserError`.

    Only what checks input belongs inside: a ValueError from anywhere else is a defect, and keeps
    its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
