"""One key for every chunk of a row, its keys' mean or maximum of unit length."""
