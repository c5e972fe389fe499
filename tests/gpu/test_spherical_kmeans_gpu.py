"""Clusters of tokens on a CUDA device: as good as the C library's, the same in any company, without waiting."""

import torch
from test_spherical_kmeans import unit
from torch import Tensor

from saccade.kernels.spherical_kmeans.api import member_means
from saccade.selection.clusters.mass_index import alike


def planted(keys: Tensor, counts: Tensor, made: Tensor) -> tuple[Tensor, ...]:
    labels = alike(keys, counts, 256, made)
    return labels, *member_means(keys, labels, 256)


def test_blocks_of_2048_tokens() -> None:
    """One is cut by sinks; keys have a direction in common. Near ties may fall either way, and carry others along."""
    chance = torch.Generator().manual_seed(0)
    keys = (torch.randn(40, 2048, 128, generator=chance) + 2 * torch.randn(128, generator=chance)).bfloat16().float()
    counts, made = torch.tensor([2032, *[2048] * 39]), torch.tensor([254, *[256] * 39])
    keys[0, 2032:] = 0
    given = tuple(one.cuda() for one in (keys, counts, made))
    planted(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = planted(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, alone in zip(found, planted(*(one[:1] for one in given)), strict=True):
        assert one[:1].equal(alone)
    labels, wanted = found[0].cpu(), alike(keys[:4], counts[:4], 256, made[:4])
    # What k-means adds up: inner products of directions with their cluster's, some .2 each.
    x = unit(keys - keys.mean(1, keepdim=True))
    ours, theirs = (x[1].new_zeros(256, 128).index_add_(0, one[1], x[1]).norm(dim=1).sum() for one in (labels, wanted))
    assert abs(ours - theirs) < 1e-3 * theirs and (labels[:4] == wanted).float().mean() > 0.9
    assert [len(set(row.tolist())) for row in labels] == [255, *[256] * 39]
