"""`python -m benchmarks serve` and `agent`: vLLM under clients that never wait, and through an agent's day."""
