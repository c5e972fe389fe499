"""Clusters in order of their units and chunks in order of their clusters, each with the radius of what is below."""
