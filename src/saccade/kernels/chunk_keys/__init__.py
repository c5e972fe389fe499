"""One key for every chunk of a row, its keys' mean or maximum of unit length; or bounds of its keys."""

from saccade.kernels.chunk_keys.api import ChunkPooling, chunk_bounds, chunk_keys

__all__ = ["ChunkPooling", "chunk_bounds", "chunk_keys"]
