"""Every method beside the others: the same questions, at equal budgets, of any model."""
