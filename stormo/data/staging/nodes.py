"""A copy on every node of a job: made by one process of each, leased by all, reported by rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.data.staging.copying import StoppedError
from stormo.data.staging.node_cache import Lease, lease_copy, stage
from stormo.errors import SettingError, pluralize
from stormo.telemetry.text import format_bytes, tell

if TYPE_CHECKING:
    from stormo.distributed.world import World

_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")


@dataclass(frozen=True, kw_only=True)
class NodeCopy:
    """The copy of this node, seen from one of its workers."""

    path: Path
    lease: Lease
    sentence: str | None  # on rank 0


def local_folder(named: str = "") -> Path:
    """The folder of this node for copies: as named, or else where the system says that temporary files go."""
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    path = Path(named or (os.environ[variable] if variable else "/tmp")).expanduser().absolute()
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise SettingError(
            f"data is to be staged to {path}" + (f", which is ${variable}" if variable and not named else ""),
            "that is no folder that can be written to on this node",
            "name one with --stage FOLDER",
        )
    return path


def stage_on_nodes(
    world: World, source: str | Path | None, folder: Path, *, keep: bool = False, stop: Callable[[], int] = lambda: 0
) -> NodeCopy:
    """Copy to every node of a job; all workers call it, and the source is that of the first worker of each node.

    Where one of these was stopped by a signal, all workers raise `StoppedError`.
    """
    own: list[tuple[Path, Lease]] = []

    def copy() -> dict[str, Any]:
        assert source is not None
        try:
            done = stage(Path(source), folder, keep=keep, tell=tell if world.is_main else lambda _: None, stop=stop)
        except StoppedError as error:
            return {"stopped": error.signal_number}
        own.append((done.path, done.lease))
        figures = {name: getattr(done, name) for name in ("num_bytes", "copied_bytes", "seconds")}
        return {"name": done.entry.name, **figures}

    try:
        done = world.on_each_node(copy)
        each = world.gather_objects(done if world.rank_info.local_rank == 0 else None)
        nodes = [node for node in each or [] if node]
        if stopped := world.broadcast_object(max((node.get("stopped", 0) for node in nodes), default=0)):
            error = StoppedError(stopped)
            if world.is_main:
                tell(str(error))
            raise error
        if not own:
            own.append(lease_copy(folder, done["name"]))  # it is there, since the one who copied holds it
    except BaseException:
        for _, lease in own:
            lease.release()
        raise
    ((path, lease),) = own
    return NodeCopy(path=path, lease=lease, sentence=sentence(nodes, path) if nodes else None)


def sentence(nodes: list[dict[str, Any]], path: Path) -> str:
    """What was copied, how fast on the slowest node, and where to on the first."""
    copied = [node for node in nodes if node["copied_bytes"] > 0]
    slowest = max(copied or nodes, key=lambda node: float(node["seconds"]))
    size, seconds = format_bytes(nodes[0]["num_bytes"]), slowest["seconds"]
    where = f"{path}" if len(nodes) == 1 else f"{path} and the like on {len(nodes)} nodes"
    if not copied:
        return f"Data: {size} were staged already, checked in {seconds:.1f} s: {where}."
    rate = format_bytes(slowest["copied_bytes"] / seconds)
    reused = "" if len(copied) == len(nodes) else f", reused on {pluralize(len(nodes) - len(copied), 'node')}"
    slow = "" if len(nodes) == 1 else " on the slowest"
    return f"Data: staged {size} in {seconds:.1f} s ({rate}/s{slow}) to {where}{reused}."
