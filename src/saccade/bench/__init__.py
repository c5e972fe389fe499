"""Benchmarks: timings that name their baseline, machine, threads, dtype and shapes."""
