"""Adapters: they translate a runtime's layouts into rows and views; selection itself lives below them."""
