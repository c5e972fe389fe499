"""Checks and timings on a CUDA device: `benchmarks/gpu.sh` runs them all, `vllm/` holds those of served models."""
