"""Loads the library that the install built beside this file; without one, or with a stale one, there is none."""

import ctypes
import functools
import struct
from pathlib import Path

from torch import Tensor

from saccade.errors import KernelError

FILE = Path(__file__).with_name("libsaccade.so.1")

# As in attention.c. A library that an older source built is not called.
_ABI_VERSION = 14
MOST_GROUP = 32
MOST_DIM = 256
LEAST_PAGE = 4  # tokens of a page, where keys are columns
LINE = 64  # bytes of a line of a tile

POOLING = {None: 0, "max": 1, "mean": 2, "each": 3}

# Vectors of at most this many floats are used; 0 leaves it to the machine. Tests lower it to reach every code path.
widest = 0


def _struct(addresses: str, factors: str, numbers: str) -> struct.Struct:
    """How the library's structs lie, everything 8 bytes wide: absent tensors are 0, strides are in bytes."""
    return struct.Struct(f"{len(addresses.split())}P{len(factors.split())}d{len(numbers.split())}q")


# C documents the fields, where it declares each: `struct call` in attention.c, `bounds` and `update` in pages.h, the
# other structs in the files of their names.
# Packed, not a `ctypes.Structure`: whose fields lie all over the memory, which the kernels between calls have emptied.
Call = _struct(
    "q k v table starts lengths ids counts dense kept out scores sinks",
    "scale soft_cap",
    "k_page k_slot k_head k_dim v_page v_slot v_head tiled batch query_heads kv_heads dim bf16 narrow "
    "page pages row_pages max_len sets width unit kept_heads pooling threads lanes",
)
Bounds = _struct(
    "q lower upper lengths table scores",
    "",
    "lower_block lower_head lower_page upper_block upper_head upper_page batch query_heads kv_heads dim bf16 narrow "
    "blocks block_pages row_blocks pages unit pooling threads lanes",
)
Update = _struct(
    "k lower upper table starts lengths changed blocks_of",
    "",
    "k_page k_slot k_head k_dim tiled lower_block lower_head lower_page upper_block upper_head upper_page "
    "batch kv_heads dim bf16 page pages row_pages blocks block_pages row_blocks unit count filled threads lanes",
)
TopK = _struct(
    "scores lengths ids counts",
    "",
    "row_step group_step batch groups width kept last ranked unit numerator denominator minimum threads lanes",
)
RankUnion = _struct("ids counts merged found", "", "batch heads width limit universe threads")
KMeans = _struct("vectors counts made labels centroids", "", "heads count dim clusters iterations threads lanes")
Mass = _struct(
    "products q slots lengths sizes spreads labels ends used scores",
    "scale spread",
    "set_slot set_head label_slot label_head label_bytes room held batch heads group dim places width "
    "sinks tokens sets each threads lanes",
)
ChunkKeys = _struct(
    "k table starts edges means",
    "",
    "k_page k_slot k_head k_dim tiled batch kv_heads dim bf16 page pages row_pages chunks threads",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where the install built none that fits."""
    if not FILE.is_file():
        return None
    try:
        found = ctypes.CDLL(str(FILE))
        versions = found.saccade_abi_version, found.saccade_call_size
    except (OSError, AttributeError):
        return None
    for function in versions:
        function.argtypes, function.restype = [], ctypes.c_int64
    if (versions[0](), versions[1]()) != (_ABI_VERSION, Call.size + Bounds.size + Update.size):
        return None
    for operation in (
        *(found.saccade_attention, found.saccade_page_scores, found.saccade_update_pages),
        *(found.saccade_topk, found.saccade_rank_union),
        *(found.saccade_spherical_kmeans, found.saccade_chunk_keys, found.saccade_token_mass),
    ):
        operation.argtypes, operation.restype = [ctypes.c_void_p], ctypes.c_int64
    found.saccade_linear.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 5]
    found.saccade_linear.restype = ctypes.c_int64
    found.saccade_level.argtypes, found.saccade_level.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_char_p
    found.saccade_exp.argtypes, found.saccade_exp.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    return found


def refusal(*tensors: Tensor) -> str | None:
    """Why the library cannot read these tensors, or None."""
    if library() is None:
        return "no library was built at install (a C compiler is needed)"
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"a tensor is on {tensor.device}, not on the CPU"
    return None


def loaded() -> ctypes.CDLL:
    """The library, after `refusal` has found nothing."""
    found = library()
    assert found is not None, "refusal was asked"
    return found


def addresses(*tensors: Tensor | None) -> list[int]:
    """What a call takes of tensors; they must live until it returns."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def check(operation: str, failure: int, failures: dict[int, str]) -> None:
    """Raise KernelError unless a call has returned 0."""
    if failure:
        raise KernelError(f"{operation}: {failures.get(failure, failure)}")


@functools.cache
def reads_tiles(head_dim: int, group: int = 1) -> bool:
    """Whether the library reads a cache in tiles of such heads, with so many query heads on each."""
    fits = head_dim % 32 == 0 and head_dim <= MOST_DIM and group <= MOST_GROUP
    return fits and library() is not None and b"bf16" in loaded().saccade_level(head_dim, widest)


def description() -> str:
    """What runs on CPU here, for reports: "native (x86-64-v4)", or "torch" where no library was built."""
    found = library()
    if found is None:
        return "torch"
    return f"native ({found.saccade_level(MOST_DIM, widest).decode()})"
