"""Decoding attention of one query per row in which some heads attend to all tokens and the others to their sets."""

from saccade.kernels.hybrid_decode.api import hybrid_decode

__all__ = ["hybrid_decode"]
