"""What runs where on one model: roles of heads, re-selection layers, rectification, and what it costs."""
