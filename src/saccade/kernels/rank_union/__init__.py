"""One set for all heads from each head's ranked choice."""
