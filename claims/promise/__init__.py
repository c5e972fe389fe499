"""How often `saccade tune` passes a candidate that breaks its promise, and one that keeps it."""
