"""Decoding attention over a chosen set of tokens or pages."""
