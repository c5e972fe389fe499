"""Dense decoding attention that can keep the scores it computes anyway."""

from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores

__all__ = ["decode_scores", "dense_decode_scores"]
