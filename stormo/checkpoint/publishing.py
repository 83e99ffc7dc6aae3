"""Making a finished folder a checkpoint: sealed, published by one rename, then older ones rotated away.

Whatever moment the process or the machine dies at, every published checkpoint is whole. One process at a time publishes
into a folder; what a killed one left behind is cleaned by the next save.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from stormo.checkpoint import leftovers
from stormo.checkpoint.files import sync_folder, write_file
from stormo.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    VALUES,
    WHOLE,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    Saved,
    require_readable,
    step_name,
)
from stormo.checkpoint.reader import Reader
from stormo.checkpoint.reading import published, read_manifest
from stormo.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What is saved, and which checkpoints stay after it.

    Kept are the newest `keep_last` up to this step, of those with a metric the best `keep_best`, and those of
    `keep_steps`. A step that is already there is replaced. A metric that is not finite counts as none.
    """

    step: int
    identity: str
    keep_last: int
    keep_best: int
    metric: float | None
    higher_is_better: bool = True
    keep_steps: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise SettingError(
                f"step is {self.step}", "steps are counted from 0", "give the number of optimizer steps done"
            )
        if self.keep_last < 1:
            raise SettingError(
                f"keep_last is {self.keep_last}",
                "the newest checkpoint is the one to resume from",
                "set it to 1 or more",
            )
        if self.keep_best < 0:
            raise SettingError(f"keep_best is {self.keep_best}", "it is a count", "set it to 0 or more")


def manifest_of(
    folder: Path,
    saving: Saving,
    weights: str,
    files: Mapping[str, FileEntry],
    *,
    version: int = WHOLE,
    digest_of: str = VALUES,
) -> Manifest:
    """What the checkpoint of these files says of itself; `weights` is the digest of its weights."""
    return Manifest(
        step=saving.step,
        identity=saving.identity,
        metric=_metric_to_store(folder, saving, weights),
        weights_sha256=weights,
        files=dict(files),
        version=version,
        digest_of=digest_of,
    )


def _metric_to_store(folder: Path, saving: Saving, weights: str) -> float | None:
    """The metric, or that of the checkpoint being replaced where it holds the same weights."""
    if saving.metric is not None:
        return float(saving.metric) if math.isfinite(saving.metric) else None
    for path in published(folder).get(saving.step, []):
        try:
            replaced = read_manifest(path)
        except CorruptCheckpointError:
            continue  # nothing in it can be trusted; it is about to be replaced
        if replaced.weights_sha256 == weights:
            return replaced.metric
    return None


def publish(temporary: Path, folder: Path, manifest: Manifest, notices: list[str]) -> Path:
    """Seal a folder and give it its public name; what could not be cleaned away is added to the notices."""
    content = manifest.to_bytes()
    require_readable(MANIFEST, len(content), MAX_MANIFEST_BYTES)
    write_file(temporary / MANIFEST, (content,))
    # The names inside must be durable before the folder gets its public name.
    sync_folder(temporary)
    return _rename(temporary, folder, manifest.step, notices)


def _rename(temporary: Path, folder: Path, step: int, notices: list[str]) -> Path:
    """Give the folder its public name; while a step is replaced, one of its two versions is always published."""
    final = folder / step_name(step)
    old = published(folder).get(step, [])
    if not old:
        temporary.rename(final)
        sync_folder(folder)
        return final
    # A folder cannot be renamed onto a full one. So: publish beside it, unpublish the old, take over its name.
    highest = max(int(path.suffix[1:] or 0) for path in old)
    beside = folder / f"{final.name}.{highest + 1}"
    temporary.rename(beside)
    sync_folder(folder)
    try:
        for path in old:
            leftovers.remove(path)
        beside.rename(final)
        sync_folder(folder)
    except OSError as error:
        # The new one is durable and counts: the higher number wins. Only its name is not the plain one.
        notices.append(f"The checkpoint {final} could not be removed ({error.strerror}); {beside} is the newer one.")
        return beside if beside.exists() else final
    return final


def rotate(path: Path, saved: Manifest, saving: Saving, notices: list[str]) -> Saved:
    """Remove what the checkpoint just published has superseded."""
    removed = _remove_superseded(path.parent, saved, saving, notices)
    return Saved(
        path=path,
        weights_sha256=saved.weights_sha256,
        num_bytes=sum(entry.size_bytes for entry in saved.files.values()),
        removed=tuple(removed),
        notices=tuple(notices),
    )


def _has_index(path: Path) -> bool:
    """Whether the index of a checkpoint, where it has one, can be read."""
    try:
        with Reader(path):
            return True
    except CorruptCheckpointError:
        return False


def _remove_superseded(folder: Path, saved: Manifest, saving: Saving, notices: list[str]) -> list[Path]:
    """Remove what the checkpoint just saved has superseded; what cannot be removed is told, and costs only space."""
    whole: list[tuple[Path, Manifest]] = []
    surplus: list[Path] = []
    try:
        steps = published(folder)
    except OSError as error:
        notices.append(f"Old checkpoints were not removed: {folder} cannot be listed ({error.strerror}).")
        return []
    for step, revisions in steps.items():
        # Later steps belong to a future that was left by resuming from an earlier one: not superseded.
        if step > saved.step:
            continue
        try:
            manifest = read_manifest(revisions[0])
        except CorruptCheckpointError:
            continue  # damaged, or of a later format: it does not count as kept, and a person may want to look
        if manifest.identity == saved.identity:
            whole.append((revisions[0], manifest))
            surplus.extend(revisions[1:])
    if not whole or whole[0][1] != saved or not _has_index(whole[0][0]):
        notices.append(f"Old checkpoints were not removed: that of step {saved.step} does not read back as written.")
        return []
    ranked = sorted(
        (
            (m.metric if saving.higher_is_better else -m.metric, m.step, path)
            for path, m in whole
            if m.metric is not None
        ),
        reverse=True,  # of equals, the later one
    )
    kept = {path for path, _ in whole[: saving.keep_last]} | {path for _, _, path in ranked[: saving.keep_best]}
    kept |= {path for path, m in whole if m.step in saving.keep_steps}
    removed: list[Path] = []
    for path in [*(path for path, _ in whole if path not in kept), *surplus]:
        try:
            leftovers.remove(path)
            removed.append(path)
        except OSError as error:
            notices.append(f"The old checkpoint {path} could not be removed ({error.strerror}); it takes up space.")
    return removed
