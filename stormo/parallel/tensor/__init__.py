"""Tensor parallelism: layers that several workers compute together, and Krizhevsky's hybrid."""
