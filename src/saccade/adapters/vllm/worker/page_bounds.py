"""Key bounds that lie in vLLM's own pages, behind each block's keys and values: they live and die with the block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....decode.indexes import Indexes
from ....kernels.page_bounds.api import update_page_bounds
from ....selection.scorers.page_bounds import PageBounds
from ....types import KVView


@dataclass(frozen=True, slots=True)
class BlockBounds:
    """Bounds of one layer's blocks, `[blocks, Hkv, pages per block, d]` by strides: views of the cache's own memory.

    `filled`: those of a page wait until its row has filled it.
    """

    lower: Tensor
    upper: Tensor
    page: int
    filled: bool = False

    @classmethod
    def behind(cls, kv_cache: Tensor, block: int, head_dim: int, page: int, filled: bool = False) -> BlockBounds:
        """Those in the padding of a cache whose blocks are `bounds_bytes` longer than their content.

        The cache is `[blocks, Hkv, block, 2 · d]`, contiguous but for the padding.
        """
        blocks, heads, per_block = kv_cache.shape[0], kv_cache.shape[1], block // page
        step, content = kv_cache.stride(0), kv_cache[0].numel()
        size = heads * per_block * head_dim
        assert step - content >= 2 * size, "the cache was laid out by our own specification"

        def side(number: int) -> Tensor:
            start = kv_cache.storage_offset() + content + number * size
            strides = (step, per_block * head_dim, head_dim, 1)
            return kv_cache.as_strided((blocks, heads, per_block, head_dim), strides, start)

        return cls(side(0), side(1), page, filled)

    def lies_in(self, kv_cache: Tensor) -> bool:
        """Whether this is that cache's memory: vLLM may run with a small one first and put another in its place."""
        return self.lower.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()

    def update(self, kv: KVView, start: Tensor, count: int) -> None:
        """Recompute the pages of tokens `start..start + count` of every row from the cache, not beyond its length."""
        update_page_bounds(
            self.lower,
            self.upper,
            kv,
            page=self.page,
            start=start,
            count=count,
            table=kv.rows.page_table,
            filled=self.filled,
        )


class PagedIndexes(Indexes):
    """The indexes of all requests, by layer, up to date; `fills`: pages that single tokens fill are the search's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, BlockBounds] = {}
        self.fills = False

    def of(self, layer: int, kv: KVView) -> PageBounds | None:
        bounds = self.layers.get(layer)
        if bounds is None:
            return None
        return PageBounds(bounds.lower, bounds.upper, bounds.page, kv.rows.page_table, self.fills)

    @property
    def nbytes(self) -> int:
        return sum(bounds.lower.numel() * bounds.lower.element_size() * 2 for bounds in self.layers.values())
