"""Work shared out among processes, for what nobody times: the other cores of a machine are idle otherwise."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch

from ..errors import SaccadeError

T = TypeVar("T")


def workers_for(count: int, *, cores: int, threads: int, device: str) -> int:
    """How many processes may share `count` pieces of work, of `threads` threads each; 1: do it yourself.

    Forked processes see everything that was loaded, but neither accelerators nor OpenMP survive a fork; without
    threads of their own they need neither.
    """
    if device != "cpu" or threads != 1 or not sys.platform.startswith("linux"):
        return 1
    return max(min(count, cores), 1)


@contextmanager
def on_threads(threads: int) -> Iterator[int]:
    """So many CPU threads inside, whatever ends it; gives how many there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def shared_out(work: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """`work(0)` to `work(count - 1)` in this order, done in forked processes; results are pickled, the work is not.

    Raises:
        SaccadeError: a process that was killed, by the machine for want of memory for instance.
        Exception: what `work` raises.
    """
    others = active_children()
    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=_begin, initargs=(work,))
    try:
        yield from pool.map(_do, range(count))
    except BrokenProcessPool:
        raise SaccadeError("a worker process was killed; --threads 2 does without them, and is slower") from None
    finally:
        # Nobody waits for what was begun when an error or an interruption has ended the rest.
        for process in active_children():
            if process not in others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


_work: Callable[[int], Any]
"""What this process does, if it is a worker."""


def _begin(work: Callable[[int], Any]) -> None:
    global _work
    _work = work
    # An interruption reaches all processes of a terminal; the first one ends the others, if only by its own end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has been forked"
    parent.join()
    os._exit(1)


def _do(number: int) -> Any:
    return _work(number)
