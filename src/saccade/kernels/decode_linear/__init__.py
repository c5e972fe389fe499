"""The product of one bfloat16 weight with the few rows of a decode step."""
