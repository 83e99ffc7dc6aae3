"""Trains one PyTorch model on many devices: fast, exact, in one command."""

from __future__ import annotations

from stormo.version import __version__

TYPE_CHECKING = False  # as in typing, which `python -m stormo` must not import from the current folder
if TYPE_CHECKING:
    from typing import Any

    from stormo.script.world import World
    from stormo.tasks.task import Task

__all__ = ["Task", "World", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports torch only for those who ask for the world."""
    if name == "World":
        from stormo.script.world import World

        return World
    if name == "Task":
        from stormo.tasks.task import Task

        return Task
    raise AttributeError(f"module 'stormo' has no attribute {name!r}")
