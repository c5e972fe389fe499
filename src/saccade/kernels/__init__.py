"""Attention operations on tensors; they know `Rows`, `KVView` and `Selection`, never policies.

Each operation is a folder: `api.py` checks its arguments once and dispatches, `reference.py` is plain torch for any
device and layout without host synchronisation; fast paths are `cpu.py` (torch), `native.py` (C) and `triton.py` (CUDA).
"""
