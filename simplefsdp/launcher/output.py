"""Output whose errors end no run: the terminal may be closed, or a log's disk may be full."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Unbroken:
    """A stream that ignores errors. Once its reader is gone, all further output is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def end(self) -> None:
        """Flush for the last time, and drop what still cannot be written."""
        try:
            self._stream.flush()
        except OSError:
            self._write_nowhere()

    def _drop(self, error: OSError) -> None:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # there may be room again
            self._write_nowhere()

    def _write_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Inside, ``print`` never raises an OSError, neither without a reader nor on a full disk."""
    streams = sys.stdout, sys.stderr
    ours = [_Unbroken(stream) for stream in streams]
    sys.stdout, sys.stderr = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in ours:
            stream.end()
        sys.stdout, sys.stderr = streams
