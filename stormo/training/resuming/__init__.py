"""A run that goes on: which one it is, what it hands on, and which of its settings may be others now."""
