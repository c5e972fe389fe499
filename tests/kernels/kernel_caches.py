"""Caches for the kernel tests: every layout, with NaN in all memory that no row owns."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from saccade.types import KVView, Rows, Softmax

LAYOUTS = ("buffer", "paged", "interleaved", "apart", "columns", "strided")
"""transformers' [B, Hkv, cap, d]; vLLM's [pages, page, Hkv, d], plain, or k and v side by side, or v with other
strides than k; vLLM's on CPU, where a page's keys are transposed; head dim not last."""

COLUMN_PAGES = (5, 16, 32, 48, 128)
"""Tokens of a page where keys are columns: fewer than a vector has numbers, as many, more, and no power of two."""


@dataclass(frozen=True, repr=False)
class Case:
    """A cache of ragged rows with a query, and the same numbers in logical order.

    Attributes:
        keys, values: `[row][head]` of `[T, d]` in float64, as the cache rounds them.
    """

    layout: str
    lengths: list[int]
    kv: KVView
    q: Tensor
    keys: list[list[np.ndarray]]
    values: list[list[np.ndarray]]
    softmax: Softmax = field(default_factory=lambda: Softmax(0.3))

    def __repr__(self) -> str:
        heads = f"{self.q.shape[1]} on {self.kv.kv_heads} heads of {self.kv.head_dim}"
        return f"Case({self.layout}, {self.q.dtype}, lengths {self.lengths}, {heads})"

    @property
    def queries(self) -> np.ndarray:
        return self.q.double().cpu().numpy()


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    longest: int = 40,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    head_dims: tuple[int, ...] = (1, 8, 16, 24, 64, 80),
    value_dims: tuple[int | None, ...] = (None,),
) -> Case:
    batch = draw(st.integers(1, 3))
    layout = draw(st.sampled_from(LAYOUTS))
    case = make_case(
        layout=layout,
        page=draw(st.sampled_from(COLUMN_PAGES)) if layout == "columns" else None,
        style=draw(st.sampled_from(("normal", "clustered", "constant", "peaked"))),
        dtype=draw(st.sampled_from(dtypes)),
        lengths=draw(
            st.one_of(
                st.lists(st.integers(1, longest), min_size=batch, max_size=batch),
                # Around page boundaries, and all alike.
                st.lists(st.sampled_from((1, 15, 16, 17, 31, 32, 33)), min_size=batch, max_size=batch),
                st.integers(1, longest).map(lambda length: [length] * batch),
            )
        ),
        padding=draw(st.sampled_from((0, 1, 7))),
        loose=draw(st.sampled_from((0, 0, 5))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 2, 3, 4, 5, 8))),
        head_dim=draw(st.sampled_from(head_dims)),
        value_dim=draw(st.sampled_from(value_dims)),
        seed=draw(st.integers(0, 2**31)),
    )
    sinks = draw(st.sampled_from((None, None, 0.0, 3.0, -200.0, 200.0)))
    case = case if sinks is None else with_sinks(case, sinks)
    # Far below the scores, among them, and far above.
    return with_cap(case, draw(st.sampled_from((None, None, 0.125, 2.0, 50.0))))


def int32(values: object, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def moved(case: Case) -> Case:
    """The same case on the CUDA device."""
    softmax = replace(case.softmax, sinks=None if case.softmax.sinks is None else case.softmax.sinks.cuda())
    return replace(case, kv=moved_cache(case.kv), q=case.q.cuda(), softmax=softmax)


def moved_cache(kv: KVView) -> KVView:
    """By the strides it has, which `cuda()` need not keep, with all memory in between."""

    def at(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).cuda()
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    rows = {name: getattr(kv.rows, name).cuda() for name in ("page_table", "row_start", "seq_lens")}
    parts = {name: at(getattr(kv, name)) for name in ("k", "v", "k_scale", "v_scale")}
    return replace(kv, **parts, rows=replace(kv.rows, **rows))


def with_sinks(case: Case, around: float) -> Case:
    """The same cache with a further logit for every query head: near those of the tokens, or far off."""
    heads = case.q.shape[1]
    sinks = around + torch.randn(heads, generator=torch.Generator().manual_seed(heads))
    return replace(case, softmax=replace(case.softmax, sinks=sinks))


def with_cap(case: Case, cap: float | None) -> Case:
    """The same cache, its scores capped softly."""
    return replace(case, softmax=replace(case.softmax, cap=cap))


def make_case(
    *, lengths: list[int], layout: str = "buffer", kv_heads: int = 2, group: int = 2, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, style: str = "normal", padding: int = 0, loose: int = 0,
    page: int | None = None, seed: int = 0, value_dim: int | None = None,
) -> Case:  # fmt: skip
    """Build a case; `padding` shifts the rows against the storage pages, `loose` raises the bound on the lengths.

    `value_dim`: how wide values are; None: as wide as keys.
    """
    random = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), max(lengths)
    # With padding, rows end together or start together, as left and right padding do.
    starts = [padding + (longest - length if padding % 2 else 0) for length in lengths]
    shape = (batch, kv_heads, longest, head_dim)
    k = _content(shape, style, random).to(dtype)
    v = torch.randn((*shape[:3], value_dim or head_dim), generator=random).to(dtype)
    q = torch.randn(batch, kv_heads * group, head_dim, generator=random).to(dtype)
    if layout == "buffer":
        order = torch.randperm(batch, generator=random)
        table = order.int()[:, None]
        k_pages = _buffer(k, starts, lengths)[order.argsort()].transpose(1, 2)
        v_pages = _buffer(v, starts, lengths)[order.argsort()].transpose(1, 2)
    else:
        page = page or (16 if padding else 5)
        table, total = _page_table(starts, lengths, page, random)
        k_pages = _paged(k, starts, lengths, page, table, total, layout)
        v_pages = _paged(v, starts, lengths, page, table, total, layout)
        if layout == "interleaved":
            both = torch.cat((k_pages, v_pages), dim=-1)
            k_pages, v_pages = both[..., :head_dim], both[..., head_dim:]
        if layout == "columns":
            k_pages, v_pages = _columns(k_pages, v_pages)
        if layout == "apart":
            v_pages = v_pages.transpose(1, 2).contiguous().transpose(1, 2)
    return Case(
        layout=layout,
        lengths=lengths,
        kv=KVView(k_pages, v_pages, Rows.on_host(table, starts, lengths, longest + loose)),
        q=q,
        keys=_logical(k, lengths),
        values=_logical(v, lengths),
    )


def _content(shape: tuple[int, int, int, int], style: str, random: torch.Generator) -> Tensor:
    if style == "normal":
        return torch.randn(shape, generator=random)
    if style == "peaked":
        return 6 * torch.randn(shape, generator=random)
    few = torch.randn((*shape[:2], 1 if style == "constant" else 3, shape[3]), generator=random)
    return few.gather(2, torch.randint(few.shape[2], shape[:3], generator=random)[..., None].expand(shape))


def _logical(tokens: Tensor, lengths: list[int]) -> list[list[np.ndarray]]:
    return [[*tokens[row, :, :length].double().numpy()] for row, length in enumerate(lengths)]


def _buffer(tokens: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    batch, heads, longest, head_dim = tokens.shape
    buffer = torch.full((batch, heads, max(starts) + longest + 3, head_dim), torch.nan, dtype=tokens.dtype)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        buffer[row, :, start : start + length] = tokens[row, :, :length]
    return buffer


def _page_table(starts: list[int], lengths: list[int], page: int, random: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled storage pages per row; entries that a row does not need point nowhere."""
    needed = [-(-(start + length) // page) for start, length in zip(starts, lengths, strict=True)]
    total = sum(needed) + 2
    numbers = torch.randperm(total, generator=random).tolist()
    table = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)], dtype=torch.int32)
    return table, total


def _paged(
    tokens: Tensor, starts: list[int], lengths: list[int], page: int, table: Tensor, total: int, layout: str
) -> Tensor:
    _, heads, _, head_dim = tokens.shape
    if layout == "strided":
        pages = torch.full((total, page, head_dim, heads), torch.nan, dtype=tokens.dtype).transpose(2, 3)
    else:
        pages = torch.full((total, page, heads, head_dim), torch.nan, dtype=tokens.dtype)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for position in range(length):
            slot = start + position
            pages[int(table[row, slot // page]), slot % page] = tokens[row, :, position]
    return pages


def _columns(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same pages as vLLM's CPU backend keeps them: per head keys `[d, page]`, then values `[page, d]`, and NaN
    behind each page."""
    (pages, page, heads, dim), wide = k.shape, v.shape[3]
    storage = torch.full((pages, heads * page * (dim + wide) + 24), torch.nan, dtype=k.dtype)
    both = storage[:, :-24].unflatten(1, (heads, page * (dim + wide)))
    columns = both[..., : page * dim].unflatten(2, (dim, page)).permute(0, 3, 1, 2)
    rows = both[..., page * dim :].unflatten(2, (page, wide)).transpose(1, 2)
    return columns.copy_(k), rows.copy_(v)
