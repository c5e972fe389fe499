"""The front end's process."""
