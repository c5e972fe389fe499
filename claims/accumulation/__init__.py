"""How errors accumulate while decoding sparsely, and what rectification makes good (ReSA, section 3.2)."""
