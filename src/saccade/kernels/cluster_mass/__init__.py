"""Scores of tokens by the attention mass that the sets they are in should draw."""
