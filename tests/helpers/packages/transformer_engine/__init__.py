"""A stand-in for TransformerEngine 2.20: what it keeps of its groups, and when it raises."""
