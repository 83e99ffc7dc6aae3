"""Finding, verifying and loading checkpoints.

A file is opened without following links, read once, compared with its size and SHA-256, and parsed only then;
nothing in it is ever run. There is no pointer file: the newest published folder is the latest checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stormo.checkpoint.index import boxes_digest, digest_of_ranks
from stormo.checkpoint.layout import (
    INDEX,
    ONE_INDEX,
    RANKS,
    SECTIONS,
    STATE,
    STEP_NAME,
    TENSOR_FILES,
    VALUES,
    WHOLE,
    CorruptCheckpointError,
    Found,
    Manifest,
    Snapshot,
)
from stormo.checkpoint.opening import PIECE_BYTES, compare, manifest_in, opened, opened_file, read_file, short
from stormo.checkpoint.reader import Reader, parse_state
from stormo.checkpoint.tensors import weights_digest


def find(folder: Path | str) -> list[Found]:
    """The published checkpoints of a folder, newest first; names only, nothing is verified."""
    return [Found(path=revisions[0], step=step) for step, revisions in published(Path(folder)).items()]


def published(folder: Path) -> dict[int, list[Path]]:
    """Step to its published folders, newest first on both levels; two of one step mean a replacement was cut off."""
    listed: list[tuple[int, int, Path]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = STEP_NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    listed.append((int(match[1]), int(match[2] or 0), folder / entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    by_step: dict[int, list[Path]] = {}
    for step, _, path in sorted(listed, reverse=True):
        by_step.setdefault(step, []).append(path)
    return by_step


def newest_good(folder: Path | str) -> tuple[Found | None, tuple[CorruptCheckpointError, ...]]:
    """The newest checkpoint of which every byte is as written, or None, and what is wrong with those newer than it."""
    problems: list[CorruptCheckpointError] = []
    # A replaced one of the same step is as good as it ever was: it counts until it is gone.
    for step, revisions in published(Path(folder)).items():
        for path in revisions:
            try:
                verify(path)
            except CorruptCheckpointError as error:
                problems.append(error)
            else:
                return Found(path=path, step=step), tuple(problems)
    return None, tuple(problems)


def verify(path: Path | str) -> Manifest:
    """Compare every file with its size and SHA-256, without holding any in memory."""
    path = Path(path)
    with opened(path) as folder_fd:
        manifest = manifest_in(path, folder_fd)
        for name, entry in manifest.files.items():
            digest = hashlib.sha256()
            with opened_file(path, folder_fd, name, entry) as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
            compare(path / name, digest.hexdigest(), entry)
    return manifest


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of a checkpoint; every file it lists is there with the right size, the content is not read."""
    path = Path(path)
    with opened(path) as folder_fd:
        manifest = manifest_in(path, folder_fd)
        for name, entry in manifest.files.items():
            with opened_file(path, folder_fd, name, entry):
                pass
    return manifest


def read_state(path: Path | str) -> dict[str, Any]:
    """The plain values of a checkpoint, verified; its tensors are not read."""
    path = Path(path)
    with opened(path) as folder_fd:
        entry = manifest_in(path, folder_fd).files[STATE]
        return parse_state(path / STATE, read_file(path, folder_fd, STATE, entry))


def load(path: Path | str) -> Snapshot:
    """Verify and read a checkpoint of either version, its tensors whole.

    The error for a bad one names the newest good one next to it.
    """
    path = Path(path)
    try:
        return _load(path)
    except CorruptCheckpointError as error:
        raise with_offer(error, path) from error


def with_offer(error: CorruptCheckpointError, path: Path) -> CorruptCheckpointError:
    """The same error, which goes on to name the newest good checkpoint beside a bad one."""
    folder = path.parent
    good, _ = newest_good(folder)
    if good is None:
        return CorruptCheckpointError(error.path, error.problem, f"there is no good checkpoint in {folder}")
    offer = f"the newest good checkpoint is that of step {good.step}: --resume {good.path}"
    return CorruptCheckpointError(error.path, error.problem, offer)


def _load(path: Path) -> Snapshot:
    with Reader(path) as reader:
        manifest = reader.manifest
        if manifest.version == WHOLE:
            model, optimizer, ranks = (reader.tensors(name) for name in TENSOR_FILES)
            state = reader.state()
        else:
            state = reader.state()
            model, optimizer = reader.wholes(*SECTIONS)
            if manifest.version == ONE_INDEX:
                ranks = reader.tensors(RANKS)
            else:
                ranks = {f"{rank}/{name}": t for rank in reader.ranks() for name, t in reader.own(rank).items()}
        check_digest(reader, model)
    return Snapshot(model=model, optimizer=optimizer, ranks=ranks, state=state)


def check_digest(reader: Reader, model: Mapping[str, Tensor]) -> None:
    """Refuse weights of an open checkpoint that are not those its manifest was written for."""
    manifest = reader.manifest
    file = reader.path / (TENSOR_FILES[0] if manifest.version == WHOLE else INDEX)
    if manifest.digest_of == VALUES:
        digest = weights_digest(model)
    elif manifest.version == ONE_INDEX:
        digest = boxes_digest(reader.entries("model"))
    else:
        digest = digest_of_ranks(boxes_digest(reader.part(rank).get("model", {})) for rank in reader.ranks())
    require_digest(file, digest, manifest)


def require_digest(file: Path, digest: str, manifest: Manifest) -> None:
    """Refuse weights that are not those the manifest was written for."""
    if digest != manifest.weights_sha256:
        raise CorruptCheckpointError(
            file,
            f"the digest of its weights is {short(digest)}, the manifest says {short(manifest.weights_sha256)}: "
            "the two were not written together",
        )
