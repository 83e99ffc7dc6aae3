"""The batch-norm family."""
