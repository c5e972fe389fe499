"""What experiments of two folders share: a runner, texts, an index of a paper's; it imports saccade alone."""
