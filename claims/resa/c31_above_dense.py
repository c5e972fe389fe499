"""Sparse decoding can predict better than dense attention, as several of the papers report."""

from ..designs.continuation import Continuation
from ..judging.claim import RESA, Claim, Group, Source, Test

ARMS = {
    "TidalDecode, table 3": "tidal:budget=512,heads=query",
    "LessIsMore, table 7": "less_is_more:budget=512",
    "LycheeDecode, table 1": "lychee_decode:budget=512",
    "LycheeCluster, table 1": "lychee_cluster:budget=512",
    "ReSA, table 2": "resa",
}

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "table 2, and the other papers' tables 1, 3 and 7"),
    settings=Continuation(arms=("dense", *ARMS.values()), prompt=2048, texts=24),
    tests=tuple(
        Test(f"next token right, {arm} minus dense ({where})", "right", Group(arm), Group("dense"))
        for where, arm in ARMS.items()
    ),
    withdrawn="The tables are scores of question answering; next tokens of source code say nothing about them, and on "
    "the code model three of five arms ran without calibration.",
)
