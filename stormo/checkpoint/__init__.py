"""Checkpoints: atomic, verified, rotated, and loaded without running code from the file.

One process writes whole tensors (`save`), or every rank its own chunks of them (`Saver`). Either way, one process reads
them whole (`load`), or every rank reads what it needs (`Reader`).
"""

from stormo.checkpoint.format import OWN, CheckpointWriteError, CorruptCheckpointError, Found, Snapshot
from stormo.checkpoint.ranks import (
    BUFFER,
    BUFFERS,
    ERROR_FEEDBACK,
    LOSSES,
    error_feedback_chunks,
    local_chunks,
    local_state,
    losses_of,
    require_seen,
    restore_error_feedback,
    restore_local,
    restore_sharded,
)
from stormo.checkpoint.reader import Reader, find, load, newest_good, read_manifest, read_state, verify
from stormo.checkpoint.retention import RetentionPolicy
from stormo.checkpoint.saver import Saver
from stormo.checkpoint.state import (
    aliases,
    chunks_of,
    collect_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
    stored_buffers,
)
from stormo.checkpoint.tensors import weights_digest
from stormo.checkpoint.writer import Shard, replace_state, save, whole_chunk

__all__ = [
    "BUFFER",
    "BUFFERS",
    "ERROR_FEEDBACK",
    "LOSSES",
    "OWN",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "Found",
    "Reader",
    "RetentionPolicy",
    "Saver",
    "Shard",
    "Snapshot",
    "aliases",
    "chunks_of",
    "collect_random_state",
    "error_feedback_chunks",
    "find",
    "flatten_optimizer",
    "load",
    "local_chunks",
    "local_state",
    "losses_of",
    "newest_good",
    "read_manifest",
    "read_state",
    "replace_state",
    "require_seen",
    "restore_error_feedback",
    "restore_local",
    "restore_optimizer",
    "restore_random_state",
    "restore_sharded",
    "save",
    "stored_buffers",
    "verify",
    "weights_digest",
    "whole_chunk",
]
