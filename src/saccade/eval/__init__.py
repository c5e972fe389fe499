"""Evaluation: what sparse decoding costs in answers and saves in time, on texts that every machine has."""
