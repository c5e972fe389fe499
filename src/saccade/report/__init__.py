"""Reports: a table for the terminal and a page with figures, both from the files of a results folder."""
