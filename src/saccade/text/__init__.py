"""Where text is cut: delimiter levels of tokens, the tokens that were fed, and chunks of them."""
