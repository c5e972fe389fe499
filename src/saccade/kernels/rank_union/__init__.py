"""One set for all heads from each head's ranked choice."""

from saccade.kernels.rank_union.api import framed_rank_union, rank_union

__all__ = ["framed_rank_union", "rank_union"]
