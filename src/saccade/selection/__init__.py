"""Which tokens a query attends to: scorers, rules, indexes, and the selectors made of them."""
