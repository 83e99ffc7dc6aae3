"""The pre-flight of a training: the measurements of a job, short, before its first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stormo.config.layout import Layout
from stormo.config.schema import TrainConfig
from stormo.doctor.finding import Finding
from stormo.doctor.measured import Measured
from stormo.doctor.naming import sentence
from stormo.doctor.phases import StoppedError, end_process
from stormo.doctor.preflight import Preflight
from stormo.doctor.trouble import Limits
from stormo.errors import counted
from stormo.launch import Lifeline, Place
from stormo.telemetry.record import Notice
from stormo.telemetry.text import format_bytes

if TYPE_CHECKING:
    import torch

    from stormo.distributed.store import Store
    from stormo.distributed.world import World


def join_after_preflight(
    make: Callable[[], World],
    device: torch.device,
    config: TrainConfig,
    layout: Layout,
    place: Place,
    store: Store | None,
    lifeline: Lifeline,
) -> tuple[World, list[Notice]]:
    """Join the workers when their nodes reach one another, and measure them; what to tell, or the culprit raised."""
    from stormo.distributed.store import PeerFailedError

    flight = Preflight(
        place,
        store,
        backend=layout.backend,
        limits=Limits(arrival_s=config.workers.timeout),
        runs_folder=Path(config.run.runs_folder),
        needs_shared_folder=layout.spec.saves_apart,
        on_hang=lambda trouble: end_process(trouble, lifeline),
    )
    try:
        flight.connect()
        world = flight.join(make)
        flight.measure(device)
        flight.conclude()
    except StoppedError as stopped:
        raise PeerFailedError(str(stopped)) from None
    return world, notices_of(flight.measured, flight.findings())


def notices_of(measured: Measured, findings: list[Finding]) -> list[Notice]:
    """One line when all is well, and one for each warning."""
    warnings = [finding for finding in findings if finding.level == "warning"]
    nodes = {spot.node for spot in measured.spots}
    parts = [f"{counted(len(measured.spots), 'worker')} on {counted(len(nodes), 'node')}"]
    if measured.overall is not None:
        parts.append(f"all-reduce {format_bytes(measured.overall.bus_bytes_per_s)}/s")
    if measured.between:
        parts.append(f"{format_bytes(min(link.bytes_per_s for link in measured.between))}/s or more between nodes")
    parts.append("no slow device or link" if not warnings else counted(len(warnings), "warning"))
    said = [Notice(kind="info", text=f"preflight: {', '.join(parts)}")]
    return said + [Notice(kind="warning", text=f"preflight: {sentence(finding)}") for finding in warnings]
