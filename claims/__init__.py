"""What the papers and `saccade tune` claim, an experiment each: `python -m claims`."""
