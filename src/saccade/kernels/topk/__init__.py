"""The best k positions of every row, exactly."""

from saccade.kernels.topk.api import Order, topk

__all__ = ["Order", "topk"]
