"""Elementwise minimum and maximum of each page's keys, and the score bound they give."""

from saccade.kernels.page_bounds.api import page_scores, update_page_bounds

__all__ = ["page_scores", "update_page_bounds"]
