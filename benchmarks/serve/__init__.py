"""`python -m benchmarks serve`: requests per second and times of tokens under a load that does not let up."""
