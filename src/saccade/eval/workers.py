"""Work shared out among processes, for what nobody times: the other cores of a machine are idle otherwise."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from typing import Any, Generic, TypeVar

from ..errors import SaccadeError

T = TypeVar("T")

WORKERS_BYTES = 2 * 2**30
"""Most memory that the copies of a cache may take, one for each worker."""


def workers_for(count: int, *, cores: int, threads: int, device: str, copied_bytes: int) -> int:
    """How many processes may share `count` pieces of work; 1: do it yourself.

    Forked processes see everything that was loaded, but neither accelerators nor OpenMP survive a fork; without
    threads of their own they need neither.

    Args:
        count: pieces of work.
        cores: cores that may be used.
        threads: threads of one piece of work.
        device: where tensors lie, such as "cpu".
        copied_bytes: what a process will copy of what it sees.
    """
    if device != "cpu" or threads != 1 or not sys.platform.startswith("linux"):
        return 1
    return max(min(count, cores, WORKERS_BYTES // max(copied_bytes, 1)), 1)


def shared_out(work: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """`work(0)` to `work(count - 1)` in this order, done in forked processes; results are pickled.

    Raises:
        SaccadeError: a process that was killed, by the machine for want of memory for instance.
        Exception: what `work` raises.
    """
    context = get_context("fork")
    next_number = context.Value("q", 0)
    processes, open_ends = [], []
    for _ in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(work, count, next_number, sender), daemon=True)
        process.start()
        # The end of the pipe shows only when nobody else holds the other end.
        sender.close()
        processes.append(process)
        open_ends.append(receiver)
    done: dict[int, _Result[T]] = {}
    try:
        for number in range(count):
            while number not in done:
                if not open_ends:
                    raise SaccadeError("a worker process was killed; --threads 2 does without them, and is slower")
                for end in connection.wait(open_ends):
                    assert isinstance(end, connection.Connection)
                    try:
                        result: _Result[T] = end.recv()
                    except EOFError:
                        open_ends.remove(end)
                    else:
                        done[result.number] = result
            yield done.pop(number).value()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


class _Result(Generic[T]):
    """What became of one piece of work."""

    def __init__(self, number: int, made: T | None, error: Exception | None) -> None:
        self.number = number
        self._made = made
        self._error = error

    def value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._made  # type: ignore[return-value]  # None only where `work` returns it


def _work(work: Callable[[int], Any], count: int, next_number: Any, sender: Any) -> None:
    # An interruption reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        with next_number.get_lock():
            number = next_number.value
            next_number.value += 1
        if number >= count:
            return
        try:
            result = _Result(number, work(number), None)
        except Exception as error:
            # Raised again by the process that waits for the result.
            result = _Result(number, None, error)
        sender.send(result)
