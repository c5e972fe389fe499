"""Scorers: what tells a promising token or page from the rest."""
