"""Trains one PyTorch model on many devices: fast, exact, in one command."""

from stormo.tasks.task import Task

__all__ = ["Task", "__version__"]
__version__ = "0.1.0"
