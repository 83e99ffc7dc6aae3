"""The files of a checkpoint: their names, the sealed manifest, and the errors about them.

`step-00000123/` holds `state.json`, `manifest.json` and, by format version:

- 1: whole tensors, written by one process: `model.safetensors`, `optimizer.safetensors`, `ranks.safetensors`;
- 4: chunks of tensors, `shard-00000.safetensors` of each rank with an `index-00000.json`; `index.json` names the ranks
  that hold each tensor.

A second save of one step is first published as `step-00000123.1`: the higher number wins wherever both exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stormo.errors import EXIT_USAGE, StormoError
from stormo.system.files import fits

FORMAT_NAME = "stormo-checkpoint"
WHOLE, SHARDED = 1, 4  # the format versions; 2 and 3 were of early development
MANIFEST = "manifest.json"
STATE = "state.json"
RANKS = "ranks.safetensors"
INDEX = "index.json"
SECTIONS = ("model", "optimizer")
LOCAL = "local"  # section: weights and optimizer state of one rank, under local SGD; its error feedback
OWN = "own"  # section: random generators and buffers of one rank
TENSOR_FILES = (*(f"{section}.safetensors" for section in SECTIONS), RANKS)
FILES = (*TENSOR_FILES, STATE)
STEP_NAME = re.compile(r"step-(\d{8,20})(?:\.(\d{1,9}))?")
SHARD_NAME = re.compile(r"shard-(\d{5,9})\.safetensors")
RANK_INDEX_NAME = re.compile(r"index-(\d{5,9})\.json")
# Limits of readers, which writers keep.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024  # a few hundred bytes a rank
MAX_INDEX_BYTES = 512 * 1024 * 1024
# What `weights_sha256` is the digest of: the values, or the digests of the chunks, which depend on the mesh.
VALUES, CHUNKS = "values", "chunks"

_REQUIRED = {WHOLE: FILES, SHARDED: (INDEX, STATE)}
_PER_RANK = {WHOLE: (), SHARDED: (SHARD_NAME, RANK_INDEX_NAME)}
_TYPES: dict[str, Any] = {
    **{"step": int, "identity": str, "metric": float | None, "weights_sha256": str, "digest_of": str},
    "files": dict[str, Any],
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = "manifest_sha256"


class CorruptCheckpointError(StormoError):
    """A file of a checkpoint is damaged, or is not part of a checkpoint."""

    exit_code = EXIT_USAGE

    def __init__(self, path: Path, problem: str, advice: str = "") -> None:
        super().__init__(f"{path}: {problem}{'; ' + advice if advice else ''}.")
        self.path = path
        self.problem = problem


class CheckpointWriteError(StormoError):
    """A checkpoint could not be written; published ones are untouched."""


def require_readable(what: str, num_bytes: int, limit_bytes: int) -> None:
    """Refuse to write what no reader would accept."""
    if num_bytes > limit_bytes:
        raise CheckpointWriteError(
            f"The checkpoint was not published: its {what} would be {num_bytes:,} bytes long, and readers accept "
            f"{limit_bytes:,}; older checkpoints are untouched."
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a run needs to resume; `state` is plain JSON (tuples come back as lists)."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ranks: dict[str, Tensor]  # "0/torch_rng", ...: what differs between ranks
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file in the manifest."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Step, metric and files of a checkpoint."""

    step: int
    identity: str
    metric: float | None
    weights_sha256: str
    files: dict[str, FileEntry]
    version: int = WHOLE
    digest_of: str = VALUES

    def to_bytes(self) -> bytes:
        """The manifest as JSON, with a SHA-256 over itself."""
        body = {"format": FORMAT_NAME, **asdict(self)}
        if self.version == WHOLE:
            del body["digest_of"]
        return _canonical({**body, _SEAL: _seal(body)})


@dataclass(frozen=True, kw_only=True)
class Found:
    """A published checkpoint, not verified yet."""

    path: Path
    step: int


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is durable and published."""

    path: Path
    weights_sha256: str
    notices: tuple[str, ...] = ()  # for the user: what could not be removed, and why


def step_name(step: int) -> str:
    """The folder of a step; names sort as the steps do up to 99,999,999."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """The tensor file of a rank."""
    return f"shard-{rank:05d}.safetensors"


def rank_index_name(rank: int) -> str:
    """The index of a rank's shard."""
    return f"index-{rank:05d}.json"


def load_json(data: bytes) -> Any:
    """The value in `data`; a `ValueError` says what is wrong with it."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from error


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in `data`; a `ValueError` says what is wrong with it."""
    body = load_json(data)
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise ValueError("it is not the manifest of a stormo checkpoint")
    # Version before seal: a later version may have another seal. `is int`: JSON's true equals 1.
    if type(body.get("version")) is not int or body["version"] not in _REQUIRED:
        raise ValueError(
            f"it gives format version {str(body.get('version'))[:20]}, this stormo reads versions {WHOLE} and {SHARDED}"
        )
    seal = body.pop(_SEAL, None)
    try:  # compare bytes, not only content: so no spacing, order or repeated key can hide
        is_sealed = seal == _seal(body) and data == _canonical({**body, _SEAL: seal})
    except RecursionError as error:  # what is read may be too deep to be written
        raise ValueError("it is nested too deeply") from error
    if not is_sealed:
        raise ValueError("it does not match its own SHA-256: at least one byte changed since it was written")
    return _typed(body)


def _typed(body: dict[str, Any]) -> Manifest:
    version = body["version"]
    fields: dict[str, Any] = {name: body.get(name) for name in _TYPES}
    if version == WHOLE:
        fields["digest_of"] = VALUES
    for name, hint in _TYPES.items():
        if not fits(fields[name], hint):
            raise ValueError(f"its {name} is not valid")
    step, metric, weights, digest_of = (fields[name] for name in ("step", "metric", "weights_sha256", "digest_of"))
    if step < 0 or (metric is not None and not math.isfinite(metric)):
        raise ValueError("its step is not a count, or its metric not a finite number")
    if not is_sha256(weights) or digest_of not in (VALUES, CHUNKS):
        raise ValueError("its weights_sha256 is not a SHA-256 of values or chunks")
    files = {}
    for name, entry in fields["files"].items():
        if name not in _REQUIRED[version] and not any(kind.fullmatch(name) for kind in _PER_RANK[version]):
            raise ValueError(f"it lists the file {name[:100]!r}, which is no part of a checkpoint")
        size, sha256 = (entry.get("size_bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not is_sha256(sha256):
            raise ValueError(f"its entry for {name} has no valid size and SHA-256")
        files[name] = FileEntry(size_bytes=size, sha256=str(sha256))
    for name in _REQUIRED[version]:
        if name not in files:
            raise ValueError(f"it does not list {name}")
    return Manifest(**{**fields, "files": files, "version": version})


def is_sha256(value: object) -> bool:
    """Whether it is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
