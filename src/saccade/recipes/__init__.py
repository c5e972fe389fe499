"""What was found for a model, and how a policy is asked for."""
