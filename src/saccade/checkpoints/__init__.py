"""A model's files: where they are, what they hold, and how they are loaded."""
