"""Decoding attention of one query per row in which some heads attend to all tokens and the others to their sets."""
