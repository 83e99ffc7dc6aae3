"""Checkpoints: atomic, verified, rotated, and loaded without running code from the file.

Nothing here is distributed: one process hands over the whole state, and others get theirs from it.
"""

from stormo.checkpoint.layout import (
    CheckpointWriteError,
    CorruptCheckpointError,
    FileEntry,
    Found,
    Manifest,
    Saved,
    Snapshot,
)
from stormo.checkpoint.optimizer_state import OptimizerStateError, flatten_optimizer, restore_optimizer
from stormo.checkpoint.random_state import collect_random_state, restore_random_state
from stormo.checkpoint.reading import find, load, newest_good, read_manifest, read_state, verify
from stormo.checkpoint.tensors import weights_digest
from stormo.checkpoint.writing import save

__all__ = [
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "FileEntry",
    "Found",
    "Manifest",
    "OptimizerStateError",
    "Saved",
    "Snapshot",
    "collect_random_state",
    "find",
    "flatten_optimizer",
    "load",
    "newest_good",
    "read_manifest",
    "read_state",
    "restore_optimizer",
    "restore_random_state",
    "save",
    "verify",
    "weights_digest",
]
