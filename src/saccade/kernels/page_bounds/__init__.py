"""Elementwise minimum and maximum of each page's keys, and the score bound they give."""
