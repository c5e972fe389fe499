"""`lychee_cluster` on chunks as the authors' code cuts them: behind a delimiter anywhere in a token's piece.

Many of these cuts are inside of words, since a byte-level piece begins with its space and may hold a sign and letters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from saccade.methods.lychee_cluster import LycheeClusterOptions
from saccade.methods.method import Method
from saccade.methods.method import every_layer as plan
from saccade.selection.clusters.mass_selector import ChunkSelector
from saccade.selection.clusters.selector import ClusterSelector
from saccade.text.levels import Codes

_LEVELS = tuple(map(re.compile, (r"\n\n|---|\*\*\*|```|[}\]>]", r"[.?!。？！\n]", r"[,;:，；：、]", r"[ \t]")))


def anywhere(pieces: Iterable[str]) -> list[int]:
    """The level of the strongest delimiter anywhere in each piece, as a break behind it."""
    plain = (piece.replace("\r\n", "\n") for piece in pieces)
    return [next((level for level, one in enumerate(_LEVELS, 1) if one.search(piece)), 0) for piece in plain]


@dataclass(frozen=True)
class _Chunks(ChunkSelector):
    @property
    def codes(self) -> Codes:
        return anywhere


@dataclass(frozen=True)
class _Clusters(ClusterSelector):
    @property
    def codes(self) -> Codes:
        return anywhere


class CutsAnywhereOptions(LycheeClusterOptions):
    """Options of `cuts_anywhere`, those of `lychee_cluster`."""

    @property
    def selector(self) -> Any:
        ours: Any = super().selector
        return {ChunkSelector: _Chunks, ClusterSelector: _Clusters}[type(ours)](**vars(ours))


SOURCE = "LycheeCluster, arXiv 2603.08453, appendix B"
METHOD = Method(
    "cuts_anywhere", "chunks cut inside of words", SOURCE, CutsAnywhereOptions, plan, compared=False, tuned=()
)
