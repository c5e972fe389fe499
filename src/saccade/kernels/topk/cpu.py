"""Exact top-k on CPU: narrow the row to the blocks that can hold the answer, then let torch.topk choose."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_BLOCK = 16


def topk(scores: Tensor, lengths: Tensor, k: int, order: Literal["position", "score"]) -> tuple[Tensor, Tensor]:
    batch, groups, width = scores.shape
    kept = min(k, width)
    ids = torch.full((batch, groups, kept), -1, dtype=torch.int32)
    host = lengths.tolist()
    if host.count(host[0]) == batch:
        _choose(scores.flatten(0, 1)[:, : host[0]], kept, order, ids.flatten(0, 1))
    else:
        for row, length in enumerate(host):
            _choose(scores[row, :, :length], kept, order, ids[row])
    counts = lengths.clamp(max=kept)[:, None].expand(batch, groups).contiguous()
    return ids, counts


def _choose(rows: Tensor, kept: int, order: Literal["position", "score"], out: Tensor) -> None:
    """Write the best `kept` positions of `rows [R, n]` to the front of `out [R, kept]`."""
    count = min(kept, rows.shape[1])
    if count == 0:
        return
    if count == rows.shape[1]:
        best = torch.arange(count).expand(rows.shape[0], -1)
    else:
        best = _best(rows, count)
    if order == "score":
        # Positions are ascending, so a stable sort leaves equal scores in position order.
        ranks = rows.gather(1, best).sort(dim=1, descending=True, stable=True).indices
        best = best.gather(1, ranks)
    out[:, :count] = best


def _best(rows: Tensor, count: int) -> Tensor:
    """Positions `[R, count]`, ascending, of the best `count < n` entries of `rows [R, n]`."""
    candidates = _candidates(rows, count)
    values = rows if candidates is None else rows.gather(1, candidates)
    top = torch.topk(values, count, dim=1, sorted=False)
    best = top.indices if candidates is None else candidates.gather(1, top.indices)
    best = best.sort(dim=1).values
    # torch.topk breaks ties at the cut as it likes: rows where equal scores lie on both sides are decided again.
    cut = top.values.amin(dim=1, keepdim=True)
    for row, reaching in enumerate((rows >= cut).sum(dim=1).tolist()):
        if reaching != count:
            above = (rows[row] > cut[row]).nonzero()[:, 0]
            level = (rows[row] == cut[row]).nonzero()[: count - above.shape[0], 0]
            best[row] = torch.cat((above, level)).sort().values
    return best


def _candidates(rows: Tensor, count: int) -> Tensor | None:
    """Positions among which every score above the cut lies, or None when narrowing does not pay.

    Split the row into blocks of 16. The `count` blocks with the largest maxima hold every entry that beats the
    smallest of those maxima, and at least `count` entries reach it: the cut is no lower. Entries equal to the cut may
    lie elsewhere; the caller looks for them in the whole row.
    """
    groups, width = rows.shape
    blocks = width // _BLOCK
    if blocks < 2 * count:
        return None
    # Block i holds positions i, i + blocks, i + 2·blocks, ...: a maximum over an outer dimension vectorises.
    maxima = rows[:, : blocks * _BLOCK].view(groups, _BLOCK, blocks).amax(dim=1)
    chosen = torch.topk(maxima, count, dim=1, sorted=False).indices
    inside = torch.arange(0, blocks * _BLOCK, blocks)[:, None] + chosen[:, None]
    rest = torch.arange(blocks * _BLOCK, width).expand(groups, -1)
    return torch.cat((inside.flatten(1), rest), dim=1)
