"""One short file per method; each cites its paper. `registry.py` lists them."""
