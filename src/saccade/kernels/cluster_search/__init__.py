"""Top-down search of the cluster index: units, then clusters, then chunks, until the budget is full."""
