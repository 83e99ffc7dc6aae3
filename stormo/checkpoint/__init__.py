"""Checkpoints: atomic, verified, rotated, and loaded without running code from the file.

One process writes whole tensors (`save`), or every rank its own chunks of them (`Saver`). Either way, one process reads
them whole (`load`), or every rank reads what it needs (`Reader`).
"""

from stormo.checkpoint.format import OWN, CheckpointWriteError, CorruptCheckpointError, Found, Snapshot
from stormo.checkpoint.ranks import (
    BUFFER,
    BUFFERS,
    KEPT_BACK,
    LOSSES,
    kept_boxes,
    local_boxes,
    local_state,
    losses_of,
    require_seen,
    take_checkpoint,
    take_kept,
    take_local,
)
from stormo.checkpoint.reader import Reader, find, load, newest_good, read_manifest, read_state, verify
from stormo.checkpoint.retention import Saving
from stormo.checkpoint.saver import Saver
from stormo.checkpoint.state import (
    aliases,
    boxes_of,
    collect_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
    stored_buffers,
)
from stormo.checkpoint.tensors import weights_digest
from stormo.checkpoint.writer import Shard, replace_state, save, whole_box

__all__ = [
    "BUFFER",
    "BUFFERS",
    "KEPT_BACK",
    "LOSSES",
    "OWN",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "Found",
    "Reader",
    "Saver",
    "Saving",
    "Shard",
    "Snapshot",
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
    "verify",
    "weights_digest",
    "whole_box",
]
