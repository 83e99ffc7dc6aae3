"""Trains one PyTorch model on many devices: fast, exact, in one command."""

from typing import TYPE_CHECKING, Any

from stormo.tasks.task import Task

if TYPE_CHECKING:
    from stormo.script.world import World

__all__ = ["Task", "World", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports torch only for those who ask for the world."""
    if name == "World":
        from stormo.script.world import World

        return World
    raise AttributeError(f"module 'stormo' has no attribute {name!r}")
