"""Top-down search of the cluster index: units, then clusters, then chunks, until the budget is full."""

from saccade.kernels._cluster_tree import ClusterTree
from saccade.kernels.cluster_search.api import SearchWidths, cluster_search

__all__ = ["ClusterTree", "SearchWidths", "cluster_search"]
