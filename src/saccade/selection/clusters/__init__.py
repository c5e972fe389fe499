"""LycheeCluster's index: chunks of text, clusters of chunks, units of clusters."""
