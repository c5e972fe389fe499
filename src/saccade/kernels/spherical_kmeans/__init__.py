"""Spherical k-means with a fixed number of iterations, deterministic on every device."""
