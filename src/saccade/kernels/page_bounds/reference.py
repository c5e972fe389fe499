"""Page bounds in plain torch: fixed shapes, any layout, no host synchronisation."""

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens, grouped
from saccade.kernels._stored_bounds import Stored
from saccade.types import KVView, Pooling


def update_page_bounds(stored: Stored, kv: KVView, page: int, start: Tensor, count: int, filled: bool) -> None:
    lower, upper, table = stored
    batch, seq_lens = kv.rows.batch, kv.rows.seq_lens[:, None]
    device = kv.k.device
    begin = start[:, None].clamp(min=0)
    end = torch.minimum(start[:, None] + count, seq_lens // page * page if filled else seq_lens)
    # As many pages as `count` tokens can touch at worst. A row that touches fewer repeats its last one, so that the
    # writes below need no host decision.
    most = (count + page - 2) // page + 1
    pages = torch.minimum(begin // page + torch.arange(most, device=device), (end - 1).clamp(min=0) // page)
    # A page's positions beyond the row are read as its last token, which lies in the same page: no mask is needed.
    positions = (pages[..., None] * page + torch.arange(page, device=device)).flatten(1)
    keys = gather_tokens(kv.k, None, kv.rows, positions).view(batch, most, page, kv.kv_heads, kv.head_dim)
    touched = (end > begin)[:, 0]
    # A row that touches none repeats the first one that does: what it had may be another's too, who just wrote it.
    writer = torch.where(touched, torch.arange(batch, device=device), touched.int().argmax())
    block, inside = (index[writer] for index in _places(lower, table, pages.long()))
    for bounds, fresh in ((lower, keys.amin(dim=2)), (upper, keys.amax(dim=2))):
        by_page = bounds.transpose(1, 2)
        by_page[block, inside] = torch.where(touched.any(), fresh[writer].to(bounds.dtype), by_page[block, inside])


def page_scores(
    q: Tensor, stored: Stored, seq_lens: Tensor, page: int, pooling: Pooling, pages: int, k_scale: Tensor | None
) -> Tensor:
    lower, upper, table = stored
    kv_heads = lower.shape[1]
    queries = grouped(q, kv_heads)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    if k_scale is not None:
        queries = queries * k_scale.float().expand(kv_heads)[:, None, None]
    used = (seq_lens[:, None] + page - 1) // page
    numbers = torch.arange(pages, device=q.device)
    absent = (numbers >= used)[:, None]
    if table is None:
        lower, upper = lower[:, :, :pages], upper[:, :, :pages]
    else:
        # Numbers beyond the row are read as its last page, as its table says nothing about them; nor does it about the
        # first page of a row that has none.
        block, inside = _places(lower, table, torch.minimum(numbers, (used - 1).clamp(min=0)).long())
        block = block.masked_fill(used == 0, 0)
        lower, upper = (bounds.transpose(1, 2)[block, inside].transpose(1, 2) for bounds in (lower, upper))
    scores = queries.clamp(min=0) @ _present(upper, absent) + queries.clamp(max=0) @ _present(lower, absent)
    return scores.amax(dim=2) if pooling == "max" else scores.flatten(1, 2)


def _places(bounds: Tensor, table: Tensor | None, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Block, and place in it, of page numbers `[B, N]`."""
    if table is None:
        return torch.arange(pages.shape[0], device=pages.device)[:, None].expand_as(pages), pages
    return table.long().gather(1, pages // bounds.shape[2]), pages % bounds.shape[2]


def _present(bounds: Tensor, absent: Tensor) -> Tensor:
    """Bounds `[B, Hkv, d, P]` in float32 with zeros for pages that do not exist yet: their memory may hold NaN."""
    return bounds.float().masked_fill(absent[..., None], 0.0).transpose(-1, -2)
