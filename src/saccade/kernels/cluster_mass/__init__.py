"""The best k positions of every row, exactly."""
