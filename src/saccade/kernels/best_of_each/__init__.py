"""The best of every row as a mask, where rows want different numbers of them."""
