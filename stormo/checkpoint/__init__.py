"""Checkpoints: atomic, verified, rotated, and loaded without running code from the file.

One process writes whole tensors (`save`), or every worker its own boxes of them (`Saver`); whatever was written so, one
process reads whole (`load`), or every worker reads what it needs (`Reader`).
"""

from stormo.checkpoint.agreement import raise_together, require_seen
from stormo.checkpoint.buffers import stored_buffers
from stormo.checkpoint.index import Entry
from stormo.checkpoint.kept_back import KEPT_BACK, kept_boxes, take_kept
from stormo.checkpoint.layout import (
    OWN,
    CheckpointWriteError,
    CorruptCheckpointError,
    FileEntry,
    Found,
    Manifest,
    Saved,
    Snapshot,
)
from stormo.checkpoint.local import local_boxes, local_state, take_local
from stormo.checkpoint.optimizer_state import OptimizerStateError, flatten_optimizer, restore_optimizer
from stormo.checkpoint.parts import MisfitError, boxes_of, take_parts
from stormo.checkpoint.publishing import Saving
from stormo.checkpoint.random_state import collect_random_state, restore_random_state
from stormo.checkpoint.reader import Reader, Wanted
from stormo.checkpoint.reading import find, load, newest_good, read_manifest, read_state, verify, with_offer
from stormo.checkpoint.saver import Done, Saver
from stormo.checkpoint.shard import Box, Shard, whole_box
from stormo.checkpoint.spread import BUFFER, BUFFERS, LOSSES, aliases, losses_of, take_checkpoint
from stormo.checkpoint.tensors import weights_digest
from stormo.checkpoint.writing import replace_state, save

__all__ = [
    "BUFFER",
    "BUFFERS",
    "KEPT_BACK",
    "LOSSES",
    "OWN",
    "Box",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "Done",
    "Entry",
    "FileEntry",
    "Found",
    "Manifest",
    "MisfitError",
    "OptimizerStateError",
    "Reader",
    "Saved",
    "Saver",
    "Saving",
    "Shard",
    "Snapshot",
    "Wanted",
    "aliases",
    "boxes_of",
    "collect_random_state",
    "find",
    "flatten_optimizer",
    "kept_boxes",
    "load",
    "local_boxes",
    "local_state",
    "losses_of",
    "newest_good",
    "raise_together",
    "read_manifest",
    "read_state",
    "replace_state",
    "require_seen",
    "restore_optimizer",
    "restore_random_state",
    "save",
    "stored_buffers",
    "take_checkpoint",
    "take_kept",
    "take_local",
    "take_parts",
    "verify",
    "weights_digest",
    "whole_box",
    "with_offer",
]
