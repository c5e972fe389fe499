"""Dense attention of the last tokens of every row, which a pass runs again."""
