"""Rules: how scores become a set. The unit of the current token is in every set and counts in the budget."""

from .framed import Framed as Framed
from .rank_union import RankUnion as RankUnion
from .ratio import Ratio as Ratio
from .threshold import Threshold as Threshold
from .top_k import TopK as TopK
from .top_p import TopP as TopP
