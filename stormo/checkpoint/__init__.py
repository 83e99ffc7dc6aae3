"""Checkpoints: atomic, verified, rotated, and loaded without running code from the file.

One process writes whole tensors (`save`), or every rank its own chunks of them (`Saver`). Either way, one process reads
them whole (`load`), or every rank reads what it needs (`Reader`).
"""

from stormo.checkpoint.format import CheckpointWriteError, CorruptCheckpointError, Snapshot
from stormo.checkpoint.ranks import require_seen
from stormo.checkpoint.reader import Reader, find, load, newest_good, read_manifest, read_state, verify
from stormo.checkpoint.retention import RetentionPolicy
from stormo.checkpoint.saver import Saver
from stormo.checkpoint.state import collect_random_state, flatten_optimizer, restore_optimizer, restore_random_state
from stormo.checkpoint.tensors import weights_digest
from stormo.checkpoint.writer import Shard, replace_state, save, whole_chunk

__all__ = [
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "Reader",
    "RetentionPolicy",
    "Saver",
    "Shard",
    "Snapshot",
    "collect_random_state",
    "find",
    "flatten_optimizer",
    "load",
    "newest_good",
    "read_manifest",
    "read_state",
    "replace_state",
    "require_seen",
    "restore_optimizer",
    "restore_random_state",
    "save",
    "verify",
    "weights_digest",
    "whole_chunk",
]
