"""What the papers claim, an experiment each: `python -m claims`."""
