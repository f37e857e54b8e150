"""Work in other processes of this machine: several things at once, or apart from this process."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TypeVar

from simplefsdp.launcher.errors import RunFailed
from simplefsdp.launcher.follow import follow

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """``count`` processes that end with this one, and at once if the block raises."""
    others = set(active_children())
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
            process.join(10.0)
        raise
    pool.shutdown()


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback of its own
    follow(parent)


def shared_out(
    call: Callable[[T], R], arguments: Sequence[T], at_once: int, done: Callable[[T], None]
) -> list[R]:
    """The result of ``call`` for each of ``arguments``, in their order. The first is computed here,
    and others meanwhile in further processes, so that ``at_once`` are at work.

    Args:
        call: a function of a module, or a ``partial`` of one, for it is sent to other processes.
        arguments: of ``call``; they are sent, too.
        at_once: how many processes work, this one among them.
        done: called here with each argument whose result has been computed, by any thread.

    Raises:
        RunFailed: a process ended without an answer.
    """

    def here(argument: T) -> R:
        result = call(argument)
        done(argument)
        return result

    others = min(at_once, len(arguments)) - 1
    if others < 1:
        return [here(argument) for argument in arguments]
    try:
        with processes(others) as pool:
            futures = [_submitted(pool, call, argument, done) for argument in arguments[1:]]
            found = {0: here(arguments[0])}
            for i, future in reversed(list(enumerate(futures, 1))):  # others begin with the first
                if future.cancel():
                    found[i] = here(arguments[i])
            found |= {i: f.result() for i, f in enumerate(futures, 1) if i not in found}
    except BrokenProcessPool as error:
        raise RunFailed(
            f"one of {others + 1} processes ended without an answer, killed for want of memory, it "
            "may be; what it printed is above"
        ) from error
    return [found[i] for i in range(len(arguments))]


def _submitted(
    pool: ProcessPoolExecutor, call: Callable[[T], R], argument: T, done: Callable[[T], None]
) -> Future[R]:
    def tell(future: Future[R]) -> None:
        if not future.cancelled() and future.exception() is None:
            done(argument)

    future = pool.submit(call, argument)
    future.add_done_callback(tell)
    return future
