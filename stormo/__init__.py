"""Trains one PyTorch model on many devices: fast, exact, in one command."""

__version__ = "0.1.0"
