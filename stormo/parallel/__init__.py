"""How a model is distributed over the workers: one strategy a file."""
