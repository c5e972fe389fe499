"""The best k positions of every row, exactly."""

from saccade.kernels.topk.api import Order, topk, topk_and_last

__all__ = ["Order", "topk", "topk_and_last"]
