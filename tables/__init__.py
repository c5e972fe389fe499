"""`python -m benchmarks tables`: every table of figures in docs/, from docs/results or by arithmetic."""
