"""vLLM's caches in all the ways they lie in memory, with NaN wherever nobody may look, and sets of their pages."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

import oracles
from saccade.types import KVView, Rows, Selection

LAYOUTS = ("HND", "NHD", "HND padded", "NHD padded", "layer by layer", "head by head")
"""Heads of a block one after the other; tokens one after the other; either with room for bounds behind each block;
blocks of all layers in turn; and all blocks of a head together."""

SCALE = 0.3
NOWHERE = 10**6
"""What a block table says beyond a row's blocks."""


def empty_cache(
    layout: str, blocks: int, kv_heads: int, block: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[blocks, Hkv, block, 2 · d]`, all NaN, padding included."""
    token, content = 2 * head_dim, 2 * head_dim * block * kv_heads
    room = content + 2 * kv_heads * token * (block // 16) if "padded" in layout else content
    if layout == "head by head":
        strides = (block * token, blocks * block * token, token, 1)
        size = blocks * content
    else:
        step = 3 * room if layout == "layer by layer" else room
        head, slot = (token, kv_heads * token) if "NHD" in layout else (block * token, token)
        strides = (step, head, slot, 1)
        size = blocks * step
    storage = torch.full((size,), torch.nan, dtype=dtype)
    return storage.as_strided((blocks, kv_heads, block, token), strides)


def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks, block, Hkv, d]` where a token's lie side by side, as in FLASH_ATTN's caches."""
    head_dim = kv_cache.shape[3] // 2
    tokens = kv_cache.transpose(1, 2)
    return tokens[..., :head_dim], tokens[..., head_dim:]


def block_table(lengths: list[int], block: int, blocks: int, seed: int) -> Tensor:
    """Shuffled blocks of each row, then `NOWHERE`."""
    free = list(range(blocks))
    random.Random(seed).shuffle(free)
    needed = [-(-length // block) for length in lengths]
    table = torch.full((len(lengths), max(needed) + 2), NOWHERE, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    return table


@dataclass(frozen=True)
class Sets:
    """A selection of pages and the tokens it stands for, `tokens[row][query head]`."""

    selection: Selection
    tokens: list[list[list[int]]]


def random_sets(lengths: list[int], unit: int, groups: int, query_heads: int, seed: int, slack: int = 2) -> Sets:
    """Each holds the last page and a random number of others; the buffer has `slack` places more than the largest."""
    pick = random.Random(seed)
    chosen = []
    for length in lengths:
        last = (length - 1) // unit
        chosen.append([[*sorted(pick.sample(range(last), pick.randint(0, last))), last] for _ in range(groups)])
    width = max(len(units) for row in chosen for units in row) + slack
    ids = [[units + [-1] * (width - len(units)) for units in row] for row in chosen]
    counts = [[len(units) for units in row] for row in chosen]
    tokens = [
        [oracles.unit_tokens(row[head * groups // query_heads], unit, length) for head in range(query_heads)]
        for row, length in zip(chosen, lengths, strict=True)
    ]
    selection = Selection(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), unit)
    return Sets(selection, tokens)


def every_token(lengths: list[int], query_heads: int) -> list[list[list[int]]]:
    return [[list(range(length))] * query_heads for length in lengths]


def write(kv: KVView, tokens: list[list[list[int]]]) -> None:
    """Random keys and values for what some query head attends to; all else stays NaN."""
    group = len(tokens[0]) // kv.kv_heads
    for row, sets in enumerate(tokens):
        for head in range(kv.kv_heads):
            wanted = sorted(set().union(*sets[head * group : (head + 1) * group]))
            at = torch.tensor(wanted)
            numbers = kv.rows.page_table[row].long()[at // kv.page]
            for storage in (kv.k, kv.v):
                storage[numbers, at % kv.page, head] = torch.randn(len(wanted), kv.head_dim).to(storage.dtype)


def rows_of(table: Tensor, lengths: list[int], longest: int | None = None) -> Rows:
    """As a CUDA step has them: the host knows a bound and nothing else."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Rows(table, torch.zeros_like(seq_lens), seq_lens, longest or max(lengths))


def expected(q: Tensor, kv: KVView, tokens: list[list[list[int]]], scale: float = SCALE) -> Tensor:
    """Float64 attention of `q [B, Hq, d]` over the tokens of each query head, by loops."""
    out = []
    for row, sets in enumerate(tokens):
        reach = range(max(max(positions) for positions in sets) + 1)
        place = [(int(kv.rows.page_table[row, at // kv.page]), at % kv.page) for at in reach]
        keys, values = (
            [[storage[page, slot, head].double().tolist() for page, slot in place] for head in range(kv.kv_heads)]
            for storage in (kv.k, kv.v)
        )
        out.append(oracles.attention(q[row].double().tolist(), keys, values, sets, scale))
    return torch.tensor(out, dtype=torch.float64)


def budget(q: Tensor, kv: KVView, tokens: list[list[list[int]]], scale: float = SCALE) -> float:
    """How far attention in float32 may be from float64, whatever the order of its sums.

    With u = 2⁻²⁴: q·k errs by (d + 2) u |q| |k|, its scaled distance to the largest by twice that and 3 u of itself; a
    weight's numerator and denominator by that each, and by 4 u for the exponential and n u for the sum of n; the
    weighted sum by another n u, of at most the largest value.
    """
    unit = 2.0**-24
    keys, values = (storage.double().nan_to_num(0.0) for storage in (kv.k, kv.v))
    reach = scale * float(q.double().norm(dim=-1).max() * keys.norm(dim=-1).max())
    count = max(len(positions) for sets in tokens for positions in sets)
    weight = 2 * (2 * reach * (q.shape[-1] + 2) + 3 * 2 * reach + 4 + count)
    return unit * (weight + count) * float(values.abs().max())


def paged_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seq_lens: Tensor, scale: float = SCALE) -> Tensor:
    """What paged dense kernels do, by loops in float64: attend to the first `seq_lens[r]` tokens of a request's blocks.

    Args:
        q: `[R, H, d]`.
        k, v: `[pages, block, Hk, d]`; query head `h` reads head `h // (H / Hk)`.
        table: `[R, n]`.
    """
    block, kv_heads = k.shape[1], k.shape[2]
    out = []
    for request, length in enumerate(seq_lens.tolist()):
        place = [(int(table[request, at // block]), at % block) for at in range(length)]
        keys, values = (
            [[storage[page, slot, head].double().tolist() for page, slot in place] for head in range(kv_heads)]
            for storage in (k, v)
        )
        sets = [list(range(length))] * q.shape[1]
        out.append(oracles.attention(q[request].double().tolist(), keys, values, sets, scale))
    return torch.tensor(out, dtype=torch.float64)
