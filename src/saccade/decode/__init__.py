"""One decoding step: the state of a batch, and `attend`."""
