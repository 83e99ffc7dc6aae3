"""How a model is spread over the workers: one strategy a file."""
