"""Chosen pages as block tables: given these, a paged dense kernel attends to exactly the chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ....errors import ServingError
from ....types import KVView, Rows, Selection

_MOST_PAGES = 2**31 - 1


def refusal(unit: int, block: int) -> str | None:
    """Why sets of `unit` tokens cannot be written as tables of `block`-token blocks, or None."""
    if unit % block == 0:
        return None
    chosen = "single tokens" if unit == 1 else f"pages of {unit} tokens"
    return f"the policy selects {chosen} and a block table only whole blocks of {block}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one layer's blocks lie, and how they are numbered once each KV head of a block is a page of its own.

    Such pages start `step` numbers apart and overlap where heads lie side by side: page `number · per_block + head ·
    per_head` is that head of block `number`.

    Attributes:
        kv_heads: Hkv.
        block: tokens of a block.
        step: greatest step that leads to every head of every block; a multiple of 16 bytes if all strides are.
        per_block, per_head: pages from one block, or head, to the next.
    """

    kv_heads: int
    block: int
    step: int
    per_block: int
    per_head: int

    @classmethod
    def of(cls, kv: KVView) -> Layout:
        """Of a cache whose keys and values lie alike in its blocks.

        Raises:
            ServingError: more pages than a table of int32 can name.
        """
        blocks, block, kv_heads, _ = kv.k.shape
        assert kv.k.stride()[::2] == kv.v.stride()[::2], "keys and values share their blocks"
        # The stride of a single head means nothing.
        between_blocks, between_heads = kv.k.stride(0), kv.k.stride(2) if kv_heads > 1 else 0
        step = gcd(between_blocks, between_heads)
        layout = cls(kv_heads, block, step, between_blocks // step, between_heads // step)
        if layout.pages(blocks) > _MOST_PAGES:
            raise ServingError(
                f"{blocks} blocks of {kv_heads} KV heads are {layout.pages(blocks)} pages of one head each, more than "
                f"the {_MOST_PAGES} that a block table can name; lower --gpu-memory-utilization"
            )
        return layout

    def pages(self, blocks: int) -> int:
        """How many page numbers so many blocks take."""
        return (blocks - 1) * self.per_block + (self.kv_heads - 1) * self.per_head + 1

    def one_head_pages(self, storage: Tensor) -> Tensor:
        """Keys or values `[blocks, block, Hkv, d]` as `[pages, block, 1, d]`; the same memory."""
        blocks, block, _, head_dim = storage.shape
        _, slot, _, inner = storage.stride()
        # A single head's stride is never used, but the copy engine of newer GPUs wants it aligned.
        return storage.as_strided((self.pages(blocks), block, 1, head_dim), (self.step, slot, head_dim * inner, inner))


@dataclass(frozen=True, slots=True)
class Tables:
    """Requests of one new token each, R for every batch row: one if all heads share a set, else one per set.

    Attributes:
        blocks: int32 `[B · R, n]`, numbers of blocks, or of `Layout.one_head_pages` if R > 1. Those behind a request's
            tokens are the row's own and not to be read.
        seq_lens: int32 `[B · R]`, tokens of each request; the last block may be partial.
        starts: int32 `[B · R + 1]`, place of each request's token among all.
    """

    blocks: Tensor
    seq_lens: Tensor
    starts: Tensor


class StepTables:
    """Makes the tables of a step; what its layers have in common is computed once, as many small kernels cost time.

    Shapes follow from those of the arguments, and nothing is read on the host. Rows have no left padding; `unit` is
    tokens of a page, a multiple of the block; `groups` are the sets of a row: 1, Hkv or Hq.
    """

    def __init__(self, rows: Rows, layout: Layout, unit: int, groups: int) -> None:
        assert refusal(unit, layout.block) is None, "the attention operation is chosen by the policy's unit"
        device, lengths = rows.seq_lens.device, rows.seq_lens[:, None]
        self.key = rows, layout, unit, groups
        self._inside = torch.arange(unit // layout.block, dtype=torch.int32, device=device)
        self._last = (lengths - 1).div(layout.block, rounding_mode="floor")
        self._missing = -(-lengths).remainder(unit)
        heads = torch.arange(groups, dtype=torch.int32, device=device)[:, None]
        self._heads = heads.div(max(groups // layout.kv_heads, 1), rounding_mode="floor") * layout.per_head
        self._starts = one_token_each(rows.batch * groups, device)
        self._latest: tuple[Selection, Tables] | None = None

    def of(self, selection: Selection) -> Tables:
        """The tables of a selection whose sets all hold the page of the row's last token.

        That page alone may be partial; as ids ascend, it comes last. The same selection again costs nothing.
        """
        if self._latest is None or self._latest[0] is not selection:
            self._latest = selection, self._made(selection)
        return self._latest[1]

    def _made(self, selection: Selection) -> Tables:
        rows, layout, unit, groups = self.key
        places = selection.ids.clamp(min=0)
        if unit > layout.block:
            places = (places[..., None] * (unit // layout.block) + self._inside).flatten(2)
            # The last page may be wider than what is left of the row.
            places = torch.minimum(places, self._last[:, None])
        numbers = rows.page_table.gather(1, places.flatten(1).long()).view(rows.batch, groups, -1)
        if groups > 1:
            numbers = torch.add(self._heads, numbers, alpha=layout.per_block)
        seq_lens = torch.add(self._missing, selection.counts, alpha=unit)
        return Tables(numbers.flatten(0, 1), seq_lens.flatten(), self._starts)


def one_token_each(requests: int, device: torch.device) -> Tensor:
    """Int32 `[requests + 1]`: where each request's tokens start if it has one."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device)
