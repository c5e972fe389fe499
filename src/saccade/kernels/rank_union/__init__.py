"""One set for all heads from each head's ranked choice."""

from saccade.kernels.rank_union.api import rank_union

__all__ = ["rank_union"]
