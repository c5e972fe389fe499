"""How attention is cut into programs: the sizes of a program, and how many share a head's tokens.

All of it follows from shapes that the host knows, so that a CUDA graph keeps its grids while lengths change.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

MOST_SPLITS = 128
"""Parts of a head that one program of the combining kernel can hold."""
PROLOGUE = 1
"""Blocks that a program could read while it starts: loads that wait for each other, and its share of the combining."""
REGISTERS = 65536
"""Of a multiprocessor; a thread has at most 255."""
MOST_REGISTERS = 255
LISTED_REGISTERS = 168
"""Of a thread that attends to sets alone: with all 255 it is no less busy, and 0.2 µs slower on an H200."""
MOST_WAVES = 8
"""Times that all places are filled: where rows are shorter than their bound, even programs with nothing to read count.

Of 4, 8 and 16 on an H200: 28 rows of 16K were fastest with it, and one long row among short ones loses little.
"""
TOLERANCE = 1.03
"""Time given up for more and shorter parts, which even out rows of different lengths."""
INTERPRETED_PROCESSORS = 2
"""Multiprocessors that Triton's interpreter pretends to have."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of a program that streams keys and values.

    Attributes:
        block: tokens of an iteration.
        warps: of 32 threads.
        stages: blocks on their way at a time, the one in use included.
        resident: programs that a multiprocessor is meant to run at once.
    """

    block: int
    warps: int
    stages: int
    resident: int

    @property
    def registers(self) -> int:
        """Per thread, as many as let the resident programs fit: they come in eights."""
        return min(MOST_REGISTERS, REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


def tuning(head_dim: int, item_size: int) -> Tuning:
    """What keeps memory busy: enough bytes on their way per multiprocessor, in programs that wait in turn.

    The one place to try other constants. Of those tried on an H200, few programs with long blocks were the fastest.

    Args:
        head_dim: padded to a power of two.
        item_size: bytes of a number in the cache, 4 where it is widened for the products.
    """
    if item_size == 4:  # whose products are not the tensor cores': a longer block does not fit the registers
        return Tuning(block=max(16, min(64, 2048 // head_dim)), warps=4, stages=3, resident=3)
    if item_size == 1:  # whose conversion takes registers
        return Tuning(block=max(16, min(64, 16384 // head_dim)), warps=4, stages=4, resident=2)
    return Tuning(block=max(16, min(128, 16384 // head_dim)), warps=4, stages=2, resident=2)


def padded(batch: int) -> int:
    """The rows for which so many are planned: sizes for which vLLM captures a graph, unless told otherwise.

    Steps of every other size then run kernels that captures have compiled.
    """
    if batch <= 4:
        return 1 << max(batch - 1, 0).bit_length()
    step = 8 if batch <= 256 else 16
    return -(-batch // step) * step


@lru_cache(maxsize=4096)
def split_counts(streams: tuple[tuple[int, int], ...], places: int) -> tuple[int, ...]:
    """Parts of each kind of stream that finish soonest if `places` programs run at a time; of those the most.

    Programs run in waves, each as long as a part and its prologue; a wave that is not full costs as much as a full one.

    Args:
        streams: per kind how many streams there are, and how many blocks each of them has.

    Returns:
        Parts of a stream, per kind; all parts are about as long.
    """
    longest = max((blocks for count, blocks in streams if count), default=1)
    spans = {-(-longest // parts) for parts in range(1, min(MOST_SPLITS, longest) + 1)}

    def counts(span: int) -> tuple[int, ...]:
        return tuple(min(MOST_SPLITS, max(1, -(-blocks // span))) if count else 1 for count, blocks in streams)

    def waves(span: int) -> int:
        return -(-sum(count * parts for (count, _), parts in zip(streams, counts(span), strict=True)) // places)

    def time(span: int) -> int:
        return waves(span) * (span + PROLOGUE)

    allowed = [span for span in spans if waves(span) <= MOST_WAVES] or [longest]
    soonest = min(map(time, allowed))
    return counts(min(span for span in allowed if time(span) <= soonest * TOLERANCE))


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
