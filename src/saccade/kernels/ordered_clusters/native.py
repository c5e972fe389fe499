"""Clusters in order in C: labels are sorted by counting them, and every key is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._cluster_tree import Planted
from saccade.kernels._native import library as native
from saccade.kernels._native.attention import ITEM_SIZE


def refusal(keys: Tensor, centroids: Tensor) -> str | None:
    """Why the library cannot take this call, or None."""
    if centroids.dtype not in ITEM_SIZE:
        return f"the centroids are {centroids.dtype}, not float32 or bfloat16"
    return native.refusal(keys)


def ordered_clusters(
    keys: Tensor, labels: Tensor, centroids: Tensor, parents: Tensor, tops: Tensor, lengths: Tensor
) -> Planted:
    (problems, chunks, head_dim), clusters, units = keys.shape, centroids.shape[1], tops.shape[1]
    # These must live until the call returns: it holds addresses.
    given = [tensor.contiguous() for tensor in (keys, labels, centroids, parents, tops, lengths)]
    planted = Planted(
        unit_centroids=tops,
        unit_radii=keys.new_empty((problems, units)),
        unit_tokens=labels.new_empty((problems, units)),
        unit_offsets=labels.new_empty((problems, units)),
        centroids=centroids.new_empty(centroids.shape),
        radii=keys.new_empty((problems, clusters)),
        numbers=labels.new_empty((problems, clusters)),
        offsets=labels.new_empty((problems, clusters)),
        members=labels.new_empty((problems, chunks)),
    )
    call = native.OrderedClusters.pack(
        *native.addresses(*given, planted.unit_radii, planted.unit_tokens, planted.unit_offsets),
        *native.addresses(planted.centroids, planted.radii, planted.numbers, planted.offsets, planted.members),
        *(problems, chunks, clusters, units, head_dim, ITEM_SIZE[centroids.dtype], torch.get_num_threads()),
    )
    failure = native.loaded().saccade_ordered_clusters(call)
    if failure:
        failures = {1: _outside("labels", labels, clusters), 2: _outside("parents", parents, units), 3: "out of memory"}
        native.check("ordered_clusters", failure, failures)
    return planted


def _outside(name: str, numbers: Tensor, most: int) -> str:
    return f"{name} must be 0 to {most}, got {int(numbers.min())} to {int(numbers.max())}"
