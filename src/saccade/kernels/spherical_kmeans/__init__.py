"""Spherical k-means with a fixed number of iterations, deterministic on every device."""

from saccade.kernels.spherical_kmeans.api import spherical_kmeans

__all__ = ["spherical_kmeans"]
