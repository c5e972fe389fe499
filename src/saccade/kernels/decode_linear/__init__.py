"""The product of one bfloat16 weight with the few rows of a decode step."""

from saccade.kernels.decode_linear.api import MOST_ROWS, DecodeLinear

__all__ = ["MOST_ROWS", "DecodeLinear"]
