"""What the project measures of itself: `python -m benchmarks`, and `gpu/` for a machine with an accelerator."""
