"""One key for every chunk of a row: its keys' mean or maximum, of unit length."""

from saccade.kernels.chunk_keys.api import ChunkPooling, chunk_keys

__all__ = ["ChunkPooling", "chunk_keys"]
