"""Calibration: which layers and heads of a model retrieve, and the cheapest policy that keeps its answers."""
