"""Decoding attention over a chosen set of tokens or pages."""

from saccade.kernels.sparse_decode.api import sparse_decode

__all__ = ["sparse_decode"]
