"""What NCCL was told about the link between workers, and where it is measured. NCCL reads these variables once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stormo.config.layout import Layout
from stormo.config.schema import TrainConfig
from stormo.errors import pluralize
from stormo.system.files import fits
from stormo.system.hardware import num_cores

BUCKET_MIB = 25  # of DDP's gradient buckets
_, _MOST_CHANNELS, _THREADS, _SOCKETS, _BUFFER = TUNED = (
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_BUFFSIZE",
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The settings of NCCL that a run uses, as they are stored with it. They change the order of sums, so the bits."""

    world_size: int
    variables: Mapping[str, str] = field(default_factory=dict)  # of `TUNED`; none for NCCL's defaults
    bucket_mb: int | None = None  # of DDP in MiB; None for torch's default
    small_algo: str | None = None  # "tree" where it sends small messages faster than NCCL's own choice
    half_gradients: bool = False  # of sharded layers in 16 bits: sent so, and summed in 32 bits
    bucket_s: float | None = None  # for an all-reduce of 25 MiB
    default_s: float | None = None  # the same with NCCL's defaults

    @classmethod
    def read(cls, value: Any) -> Link:
        """The link in a file of a run or of the cache; `ValueError` for anything else."""
        if not fits(value, cls) or "world_size" not in value:
            raise ValueError("it is no description of a link")
        link = cls(**value)
        if not all(name in TUNED and text.isdecimal() and len(text) < 10 for name, text in link.variables.items()):
            raise ValueError("it sets something else than NCCL's channels and sockets")
        if link.small_algo not in (None, "tree") or not 1 <= (link.bucket_mb or 1) <= BUCKET_MIB:
            raise ValueError("it names an unknown algorithm or bucket")
        return link

    def __str__(self) -> str:
        told = self.variables
        parts = [pluralize(told[_MOST_CHANNELS], "channel")] if _MOST_CHANNELS in told else []
        parts += [pluralize(told[_THREADS], "socket thread")] if _THREADS in told else []
        parts += [f"{pluralize(told[_SOCKETS], 'socket')} each"] if _SOCKETS in told else []
        parts += [f"buffers of {int(told[_BUFFER]) >> 20} MiB"] if _BUFFER in told else []
        text = ", ".join(parts) or "NCCL's defaults"
        if self.small_algo is not None:
            text += f", small messages by a {self.small_algo}"
        if self.bucket_mb is not None:
            text += f", gradient buckets of {self.bucket_mb} MiB"
        if self.bucket_s is None or self.default_s is None:
            return text
        text += f": {BUCKET_MIB} MiB in {1e3 * self.bucket_s:.1f} ms"
        return text + (f" instead of {1e3 * self.default_s:.1f} (NCCL's defaults)" if told else "")


# Channels, threads of a connection, sockets of a thread. All keep every value whole. The likeliest come first, as the
# time may not do for all.
_ROWS = (("1", "1", "4"), ("1", "1", "2"), ("2", "1", "2"), ("4", "1", "2"), ("8", "1", "1"))
CANDIDATES = tuple(dict(zip(TUNED, (row[0], *row, str(8 << 20)), strict=True)) for row in _ROWS)
_CORES_OF_A_WORKER = 4  # on fewer, NCCL's socket threads wait for one another
_MULTIPROCESSORS_OF_A_CHANNEL = 16  # each takes one from the computation; more of them cost more than they bring


def candidates(users: Mapping[str, str], num_multiprocessors: int) -> list[dict[str, str]]:
    """The settings to try on such a GPU beside those of the user, who has the last word."""
    found: list[dict[str, str]] = []
    most = max(1, num_multiprocessors // _MULTIPROCESSORS_OF_A_CHANNEL)
    for one in CANDIDATES:
        rest = {name: value for name, value in one.items() if name not in users}
        is_agreed = all(users.get(name, value) == value for name, value in one.items())
        if is_agreed and int(rest.get(_MOST_CHANNELS, 0)) <= most and rest and rest not in found:
            found.append(rest)
    return found


def keeps_defaults(config: TrainConfig, layout: Layout) -> str:
    """Why NCCL's own settings stay unless the user asks to measure; empty where they may be changed."""
    if config.run.deterministic:
        return "with --deterministic every start has the same"
    if layout.shares_whole_gpus:
        return "workers that share a GPU wait longer for it than for the link"
    if layout.mesh.shard > 1:
        return "weights are gathered beside the computation, which more channels slow down"
    return ""


def sends_half_gradients(config: TrainConfig, layout: Layout) -> bool:
    """Whether gradients that are computed in 16 bits are sent so, where NCCL uses sockets.

    Only where every backward reduces them: added up over micro-batches, they have 32 bits. And only where every worker
    has a link of its own: a ring crosses the link of a node once, however many workers the node has.
    """
    is_reduced = layout.zero == 3 and layout.mesh.shard > 1 and layout.mesh.pipeline == 1
    return is_reduced and 1 in (layout.num_nodes, layout.workers_per_node) and not config.run.deterministic


def too_few_cores(cores: int, workers: int) -> str:
    """Why NCCL's own settings stay unless the user asks to measure; empty where these workers have cores enough."""
    if cores >= _CORES_OF_A_WORKER * workers:
        return ""
    told = f"{pluralize(workers, 'worker')} {'has' if workers == 1 else 'share'} {pluralize(cores, 'core')}"
    return f"{told}, and with socket threads each needs {_CORES_OF_A_WORKER}"


def too_few_cores_planned(layout: Layout) -> str:
    """The same before the workers are there; empty on part of a machine, as each may get another part of it."""
    cores = num_cores()
    return "" if cores < (os.cpu_count() or 0) else too_few_cores(cores, layout.workers_per_node)


def uses_sockets(layout: Layout, environ: Mapping[str, str], infiniband: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether NCCL sends between these workers over sockets, as seen from this node."""
    if "NCCL_HOSTID" in environ or layout.shares_a_gpu:
        return True
    if layout.num_nodes == 1 or environ.get("NCCL_NET", "Socket") != "Socket":
        return False
    return environ.get("NCCL_IB_DISABLE") == "1" or not any(infiniband.glob("*"))


def link_before(config: TrainConfig, layout: Layout) -> Link | None:
    """The link settings of the resumed run, if it had as many workers; None if they are yet to be measured."""
    before = config.resumed.link if config.resumed else None
    if before is None or before["world_size"] != layout.world_size:
        return None
    link = Link.read(before)
    return link if not link.half_gradients or link.bucket_s or sends_half_gradients(config, layout) else None


def link_line(config: TrainConfig, layout: Layout) -> dict[str, str]:
    """The line of the plan; none where NCCL is not used."""
    asked = config.workers.tune_link
    if layout.backend != "nccl" or layout.world_size == 1:
        return {"link": "not measured: one worker has no link"} if asked else {}
    if asked is False:
        text = "NCCL's own settings (--no-tune-link)"
    elif link_before(config, layout) is not None:
        text = "NCCL's settings are those with which the run began"
    elif asked is None and (reason := keeps_defaults(config, layout)):
        text = f"NCCL's own settings: {reason}"
        if sends_half_gradients(config, layout):
            text += "; where it uses sockets, 16-bit gradients are sent as they are and summed in 32 bits"
    elif not asked and layout.num_nodes == 1 and not layout.shares_a_gpu:
        text = "NCCL's own settings: inside a node it needs no sockets"
    elif not asked and (reason := too_few_cores_planned(layout)):
        text = f"NCCL's own settings: {reason}"
    else:
        text = "NCCL's socket settings are measured at the start"
        text += "" if asked or layout.shares_a_gpu else " where there is no InfiniBand"
    return {"link": text}
