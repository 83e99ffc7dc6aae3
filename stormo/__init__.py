"""Trains one PyTorch model on many devices: fast, exact, in one command."""

from __future__ import annotations

from stormo.version import __version__

TYPE_CHECKING = False  # as in typing, which `python -m stormo` must not import from the current folder
if TYPE_CHECKING:
    from typing import Any

    from stormo.api.run import Run, open_run
    from stormo.api.start import run, train
    from stormo.script.world import World
    from stormo.tasks.task import Task

__all__ = ["Run", "Task", "World", "__version__", "open_run", "run", "train"]
_MODULES = {
    "Run": "stormo.api.run",
    "Task": "stormo.tasks.task",
    "World": "stormo.script.world",
    "open_run": "stormo.api.run",
    "run": "stormo.api.start",
    "train": "stormo.api.start",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, and torch only with the world."""
    if name not in _MODULES:
        raise AttributeError(f"module 'stormo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
