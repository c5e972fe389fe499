"""Caches whose keys lie as columns, and memory behind which nothing may be read."""

import ctypes
import mmap
import os
import signal
from collections.abc import Callable

import torch
from kernel_caches import Case, make_case
from page_bounds_contract import Bounds, bounds_of, expect_update


def columns(page: int, dtype: torch.dtype = torch.float32, **changes: object) -> Case:
    """Rows of several pages, the second against the grain of page and vector, the third within one vector."""
    sizes: dict[str, object] = {"lengths": [page + 150, 83, 3], "group": 3, "head_dim": 32, "padding": 7}
    return make_case(layout="columns", page=page, dtype=dtype, **(sizes | changes))  # type: ignore[arg-type] # as above


def expect_updates(case: Case, page: int) -> None:
    """In one block per row, and in scattered blocks; also past the end of rows, where nothing is touched."""
    for starts, count in (([0, 0, 0], 500), ([page + 140, 80, 0], 5), ([16, 83, 10**6], 17)):
        for unit, per_block in ((1, None), (16, None), (40, None), (1, 3), (16, 1), (40, 3)):
            expect_update(case, bounds_of(case, unit, per_block), unit, starts, count, "native")


def expect_broken(bounds: Bounds, page: int, number: int) -> None:
    """Of two pages one number of one page is none, on both sides."""
    for side in (bounds.lower, bounds.upper):
        nan = side[0, 0, :2].isnan()
        assert nan.sum() == 1 and nan[page, number]


def guarded(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Numbers at the end of a page of memory, and the address of the next."""
    edge, size = mmap.PAGESIZE, count * dtype.itemsize
    memory = mmap.mmap(-1, -(-size // edge) * edge + edge)
    numbers = torch.frombuffer(memory, dtype=dtype, count=count, offset=len(memory) - edge - size)
    return numbers, numbers.data_ptr() + size


def expect_guarded(behind: int, read: Callable[[], None]) -> None:
    """`read` reads nothing from that address on: it ends well where the memory belongs to nobody."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            # Here only: the tests' own process keeps its memory.
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
            read()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
