"""The nouns that everything else is written in: rows of a batch, a layer's cache, a chosen set, a head's role."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

HeadGrouping = Literal["kv", "query", "all"]
"""How many sets a layer chooses: one per KV head, one per query head, or one for all heads."""

Flags = tuple[bool, ...]
"""For each KV head of a layer whether something holds of it; constants on the host."""

Pooling = Literal["max", "mean", "each"]
"""How a group's query heads share a score: their maximum, the mean query's score, or one score each."""


def sum_dtype(device: torch.device) -> torch.dtype:
    """In which long sums are taken; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of each batch row lie; prepared once per step and shared by all layers.

    A row's *slots* run along its pages: slot `s` of row `b` is token `s % page` of page `page_table[b, s // page]`.
    Logical position `j` (counted from the first real token) lies in slot `row_start[b] + j`.

    Attributes:
        page_table: int32 `[B, n]`, storage pages of each row in order.
        row_start: int32 `[B]`, slot of logical position 0; left padding lies before it.
        seq_lens: int32 `[B]` (`batch` is B), number of real tokens, the current one included; 0 where a row only pads
            the batch: nothing of it is read, counted or promised.
        max_len: host bound, at least every entry of `seq_lens`.
        bounds: host copy of `(row_start, seq_lens)` per row, None if the host never knew them.
        whole: bool `[B]` on the device, rows that attend to all their tokens whatever set they are given; None: none.
    """

    page_table: Tensor
    row_start: Tensor
    seq_lens: Tensor
    max_len: int
    bounds: tuple[tuple[int, int], ...] | None = None
    whole: Tensor | None = None

    @classmethod
    def on_host(cls, page_table: Tensor, starts: list[int], lengths: list[int], max_len: int | None = None) -> Rows:
        """Build rows from host integers; `max_len` may name a looser bound that grows in step with the cache."""
        device = page_table.device
        return cls(
            page_table=page_table,
            row_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            max_len=max(lengths) if max_len is None else max_len,
            bounds=tuple(zip(starts, lengths, strict=True)),
        )

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    def units(self, unit: int) -> Tensor:
        """How many units of so many tokens each row has, the last one maybe partial; int32 `[B]`."""
        return self.seq_lens if unit == 1 else (self.seq_lens + (unit - 1)).div(unit, rounding_mode="floor")

    @property
    def uniform(self) -> bool:
        """Whether all rows are known to start and end at the same slots, so that one slice serves them all."""
        return self.bounds is not None and all(bound == self.bounds[0] for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's cache, borrowed: nothing here owns memory.

    Attributes:
        k: keys `[pages, page, Hkv, d]` by strides, RoPE already applied; `page`, `kv_heads`, `head_dim` are its sizes.
        v: values `[pages, page, Hkv, dv]` by strides; dv is nearly always d.
        rows: the batch rows that point into the pages.
        k_scale, v_scale: factors `[Hkv]` of a quantised (fp8) cache; None otherwise.
        tiled: whether a page and head's numbers lie in AMX's tiles instead, which `in_rows` reads: of keys
            `[page / 16, d / 2, 16, 2]`, 16 tokens' pairs of numbers; of values `[d / 16, page / 2, 16, 2]`.
    """

    k: Tensor
    v: Tensor
    rows: Rows
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    tiled: bool = False

    @property
    def page(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    def in_rows(self) -> KVView:
        """The same cache, copied if it is `tiled`: for who reads it by strides."""
        if not self.tiled:
            return self
        (pages, page, heads, d), dv = self.k.shape, self.v.shape[3]
        k = self.k.transpose(1, 2).reshape(pages, heads, page // 16, d // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
        v = self.v.transpose(1, 2).reshape(pages, heads, dv // 16, page // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
        return replace(self, k=k.reshape(self.k.shape), v=v.reshape(self.v.shape), tiled=False)

    def picked(self, rows: list[int]) -> KVView:
        """The same cache seen by some of its rows."""
        held = self.rows
        if rows == list(range(held.batch)):
            return self
        chosen = torch.tensor(rows, device="cpu").to(held.seq_lens.device, non_blocking=True)
        table, starts, lengths = (
            tensor.index_select(0, chosen) for tensor in (held.page_table, held.row_start, held.seq_lens)
        )
        bounds = None if held.bounds is None else tuple(held.bounds[row] for row in rows)
        return replace(self, rows=Rows(table, starts, lengths, held.max_len, bounds))

    def heads(self, start: int, stop: int) -> KVView:
        """The same cache narrowed to KV heads `start..stop`; a view, no copy."""
        if (start, stop) == (0, self.kv_heads):
            return self
        narrow = slice(start, stop)
        return replace(
            self,
            k=self.k[:, :, narrow],
            v=self.v[:, :, narrow],
            k_scale=None if self.k_scale is None else self.k_scale[narrow],
            v_scale=None if self.v_scale is None else self.v_scale[narrow],
        )


@dataclass(frozen=True, slots=True)
class Intake:
    """What layers of an index are to look at: the first `stop` tokens in `slot`, of which they know the first `kept`.

    Its first token lies in slot `origin` of the cache. All of these tokens are clean.
    """

    slot: int
    origin: int
    kept: int
    stop: int


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a layer's softmax makes of scores q·k. Scores that rank tokens know nothing of sinks and cap.

    Attributes:
        scale: their factor, usually `d ** -0.5`.
        sinks: float `[Hq]`, the logit of a token without a value that each query head attends to beside its own
            (attention sinks as parameters); None otherwise.
        cap: c where scaled scores x enter as `c · tanh(x / c)`, which keeps their order; None otherwise.
    """

    scale: float
    sinks: Tensor | None = None
    cap: float | None = None

    def heads(self, start: int, stop: int) -> Softmax:
        """The same narrowed to query heads `start..stop`."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[start:stop])


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of attention's launches, the same in all steps; what shares it runs one after the other.

    `turns` is int32 `[B · Hq]` or more: a launch's programs count themselves in it, so that the last one joins what all
    have found; zeros before it and behind it.
    """

    turns: Tensor

    @classmethod
    def of(cls, rows: int, query_heads: int, device: torch.device) -> Workspace:
        """For so many rows at most."""
        return cls(torch.zeros(rows * query_heads, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens or pages that a set of heads attends to.

    Attributes:
        ids: int32 `[B, G, M]`, logical units in ascending order, -1 after the count. G (`groups`) is 1, Hkv or Hq.
        counts: int32 `[B, G]`, how many units are chosen.
        unit: tokens per unit: 1, or a page of `unit` tokens aligned to logical position 0.
        overflowed: bool `[B, G]`, where the rule wanted more units than its buffer holds; None if it never does.
    """

    ids: Tensor
    counts: Tensor
    unit: int = 1
    overflowed: Tensor | None = None

    @property
    def groups(self) -> int:
        return self.ids.shape[1]

    def heads(self, start: int, stop: int, kv_heads: int) -> Selection:
        """The sets of KV heads `start..stop` of `kv_heads`."""
        if self.groups == 1 or (start, stop) == (0, kv_heads):
            return self
        per_head = self.groups // kv_heads
        rows = slice(start * per_head, stop * per_head)
        overflowed = None if self.overflowed is None else self.overflowed[:, rows]
        return Selection(self.ids[:, rows], self.counts[:, rows], self.unit, overflowed)

    def tokens(self, seq_lens: Tensor) -> Tensor:
        """Tokens attended to per group, int32 `[B, G]`: only the page of the current token can be partial.

        Args:
            seq_lens: int32 `[B]`.
        """
        if self.unit == 1:
            return self.counts
        return self.counts * self.unit - (-seq_lens).remainder(self.unit)[:, None]


class Role(enum.Enum):
    """`refreshes` its set, `attends_to_all`: `DENSE` no, yes; `PUBLISH` yes, yes; `SELECT` yes, no; `REUSE` no, no."""

    DENSE = "dense"
    PUBLISH = "publish"
    SELECT = "select"
    REUSE = "reuse"

    @property
    def refreshes(self) -> bool:
        return self in (Role.PUBLISH, Role.SELECT)

    @property
    def attends_to_all(self) -> bool:
        return self in (Role.DENSE, Role.PUBLISH)


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""transformers' words for layers that see, and keep, everything, or a part of the row."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The decoder that a policy is bound to: its sizes, and where they are known the marks that tell it from others.

    Attributes:
        layers: decoder layers of every kind.
        query_heads, kv_heads, head_dim: what the full-attention layers have.
        architecture: transformers' model type.
        weights: hash of a few weight rows; None before the weights are loaded.
        hidden_size, intermediate_size: widths beside attention, by which Qwen3-4B is not Qwen3-8B. A vocabulary tells
            less: fine-tuning extends it.
        kinds: what every layer is, in transformers' words; empty where all are `FULL`. A policy concerns those alone.
        window: tokens that a layer with a window or with chunks keeps, if its heads are as those of the others.
        sources: of layers that keep no keys and values, the layer whose they read.
        value_dim: width of values; None: that of keys, `head_dim`.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    architecture: str | None = None
    weights: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    kinds: tuple[str, ...] = ()
    window: int | None = None
    sources: Mapping[int, int] = field(default_factory=dict, hash=False)
    value_dim: int | None = None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention, as the model counts them."""
        return tuple(layer for layer in range(self.layers) if not self.kinds or self.kinds[layer] == FULL)

    @property
    def keeping(self) -> tuple[int, ...]:
        """Those of them that keep keys and values; the others read theirs."""
        return tuple(layer for layer in self.full_layers if layer not in self.sources)

    @property
    def windowed(self) -> tuple[int, ...]:
        """Layers that see a known part of the row."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if self.window and kind in (SLIDING, CHUNKED))

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Layers that keep neither a row's keys nor a part of them: a state of their own, or nothing."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind not in (FULL, SLIDING, CHUNKED))

    @property
    def other_kinds(self) -> str:
        """What layers without full attention are, in words."""
        return ", ".join(sorted({*self.kinds} - {FULL}))

    def full_told(self, first: int = 0) -> str:
        """Those from number `first` on, in words."""
        full = self.full_layers[first:]
        return f"{', '.join(map(str, full))} (full attention)" if self.kinds else f"{full[0]} to {full[-1]}"

    @property
    def value_width(self) -> int:
        """Of values, whether they are as wide as keys or not."""
        return self.value_dim or self.head_dim

    @property
    def pair(self) -> int:
        """Width of a key and its value together."""
        return self.head_dim + self.value_width

    @property
    def group(self) -> int:
        """Query heads per KV head, g."""
        return self.query_heads // self.kv_heads

    def token_bytes(self, itemsize: int) -> int:
        """Of a token's keys and values in all layers that keep them for good."""
        return len(self.keeping) * self.kv_heads * self.pair * itemsize
