"""`stormo doctor` across a job, and the pre-flight of a training: joins the workers and measures them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.config.layout import Layout, at_least, resolve_layout
from stormo.config.options import Parser, make_config, options_of
from stormo.config.schema import OF_ONE_CALL, NodeRange, Run, TrainConfig, Workers
from stormo.doctor.command import examine
from stormo.doctor.finding import Finding, as_json, exit_code, show
from stormo.doctor.judge import Names, sentence
from stormo.doctor.measure import Measurements
from stormo.doctor.preflight import Limits, Preflight, PreflightError, PreflightStoppedError, end_process, watchdog
from stormo.errors import EXIT_FAILURE, SettingError, StormoError, counted
from stormo.launch import AgentTimeouts, FailureReporter, RankInfo, alone, open_failure_reporter, run_node
from stormo.launch.hosts import hosts_of, start_on_hosts
from stormo.launch.nodes import find_place, launched_by, node_of
from stormo.launch.rank_info import host_name
from stormo.system.hardware import Gpu, visible_gpus
from stormo.system.process import own_command
from stormo.telemetry.record import Notice
from stormo.telemetry.text import format_bytes, write_text
from stormo.version import __version__

if TYPE_CHECKING:
    import torch

    from stormo.distributed.store import Store
    from stormo.distributed.world import World

_CODE_FILE = "STORMO_DOCTOR_CODE"  # into which the first worker of a node writes the exit code for its agent
_FLAGS = ("num_gpus", "num_nodes", "node_id", "master_addr", "master_port", "device", "backend", *OF_ONE_CALL)
_ON_EACH_NODE = ("devices", "network", "limits")  # what takes a moment and writes nothing
_EACH_NODE_S = 20.0
_LEAST_LIMIT_S = 10.0
_INTERRUPTED_S = 1.0  # to delete what was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was asked for."""

    config: TrainConfig
    json: bool
    limit_s: float
    runs_folder: str


def main(arguments: list[str]) -> int:
    """Read the flags, see who this process is, and go."""
    asked = _parse(arguments)
    place = find_place(asked.config)
    if hosts := hosts_of(asked.config):
        return start_on_hosts(asked.config, hosts, "doctor", arguments)
    layout = resolve_layout(asked.config, gpus_within(asked.limit_s), launched_by(place))
    if place is None and layout.world_size > 1:
        return _start_workers(arguments, asked, layout)
    return _work(asked, layout, place or alone())


def gpus_within(limit_s: float) -> list[Gpu]:
    """The GPUs of this machine; a driver that does not answer in time is named, and ends this process."""

    def give_up() -> None:
        text = f"stormo: the driver of the GPUs on host {host_name()} did not answer within {limit_s:g} s; "
        text += "look at the kernel log (dmesg) there, and whether nvidia-smi answers.\n"
        write_text(text, sys.stderr)
        os._exit(EXIT_FAILURE)

    watch = watchdog(limit_s, give_up)
    watch.start()
    try:
        return visible_gpus()
    finally:
        watch.cancel()


def _parse(arguments: Sequence[str]) -> Asked:
    parser = Parser(
        prog="stormo doctor",
        description="Measure all workers of a job and the links between them. Start it as you would start a training: "
        "on every node, or under srun, mpirun or torchrun.",
        epilog="The exit code is 1 where something is an error, else 0.",
        allow_abbrev=False,
    )
    options = [option for option in options_of("workers", Workers) if option.name in _FLAGS]
    for option in options:
        if option.kind is bool:
            parser.add_argument(option.flag, dest=option.key, action="store_true", default=None, help=option.help)
            continue
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else "TEXT" if option.kind is str else "N"
        parser.add_argument(option.flag, dest=option.key, metavar=metavar, help=option.help)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--limit-s", metavar="X", default="60", help="seconds for all of it (default: %(default)s)")
    parser.add_argument(
        "--runs-folder", default=Run.runs_folder, metavar="FOLDER", help="where runs go (default: %(default)s)"
    )
    parsed = parser.parse_args(list(arguments))
    given = {option.key: getattr(parsed, option.key) for option in options}
    settings = {
        option.key: option.convert(given[option.key], option.flag)
        for option in options
        if given[option.key] is not None
    }
    if isinstance(settings.get("num_nodes"), NodeRange):
        raise SettingError(
            f"--num-nodes {settings['num_nodes']} was set",
            "the doctor looks at the nodes that are there",
            "set a number",
        )
    timeout = next(option for option in options_of("workers", Workers) if option.name == "timeout")
    limit_s = timeout.convert(parsed.limit_s, "--limit-s")
    at_least("--limit-s", limit_s, _LEAST_LIMIT_S)
    config = make_config({**settings, "timeout": limit_s}, None)
    return Asked(config=config, json=parsed.json, limit_s=limit_s, runs_folder=parsed.runs_folder)


def _start_workers(arguments: list[str], asked: Asked, layout: Layout) -> int:
    """Become the agent of this node; the workers run this very command again, told who they are."""
    command = [*own_command("doctor"), *arguments]
    # A file of memory, which is gone with this process however it ends.
    with os.fdopen(os.memfd_create("stormo-doctor"), "rb") as code_file:
        environ = {**os.environ, _CODE_FILE: f"/proc/{os.getpid()}/fd/{code_file.fileno()}"}
        node = node_of(asked.config, layout)
        patience = AgentTimeouts(interrupted_s=_INTERRUPTED_S)
        same = _same_on_all(asked, layout)
        code = run_node(command, node, timeout_s=asked.limit_s, environ=environ, patience=patience, **same)
        return code or int(code_file.read() or b"0")


def _same_on_all(asked: Asked, layout: Layout) -> dict[str, Any]:
    words = {
        "--limit-s": f"{asked.limit_s:g}",
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
    }
    return {"digest": hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest(), "options": words}


def _work(asked: Asked, layout: Layout, place: RankInfo) -> int:
    """Be a worker; whatever goes wrong is told to the others before this process ends."""
    lifeline = open_failure_reporter(place) if place.launcher in ("local", "alone") else None
    code_file = os.environ.pop(_CODE_FILE, None)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every name they cannot look up
    try:
        from stormo.distributed.store import Store, address_book_of
        from stormo.doctor.network import require_rendezvous

        require_rendezvous(place)
        if lifeline is None:
            same = _same_on_all(asked, layout)
            lifeline = open_failure_reporter(
                place, board=address_book_of(place, asked.limit_s), timeout_s=asked.limit_s, **same
            )
        store = Store(place, asked.limit_s, lifeline.store_address) if place.world_size > 1 else None
        code = _examine(asked, layout, place, store, lifeline)
    except Exception as error:
        if lifeline is None or not lifeline.shows_failures:
            raise
        from stormo.distributed.store import is_secondary

        lifeline.report_failure(error, secondary=is_secondary(error))
        return error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE
    lifeline.close()
    if code_file is None:
        return code
    if place.local_rank == 0:
        Path(code_file).write_text(str(code), encoding="utf-8")
    return 0


def _examine(asked: Asked, layout: Layout, place: RankInfo, store: Any, lifeline: FailureReporter) -> int:
    """Go through all phases; print what was found, on rank 0, and return the exit code on all."""
    from stormo.distributed.devices import device_of, share_cores
    from stormo.distributed.world import World

    def give_up(trouble: PreflightError) -> None:
        _print(asked, layout, flight.names, trouble.findings)
        end_process(trouble, lifeline)

    flight = Preflight(
        place,
        store,
        backend=layout.backend,
        limits=Limits(arrival_s=asked.limit_s, one_measurement_s=0.4, all_rounds_s=15.0, whole_s=asked.limit_s),
        runs_folder=Path(asked.runs_folder),
        needs_shared_folder=False,
        on_hang=give_up,
    )
    share_cores(place)
    machines: list[Finding] = []
    try:
        flight.connect()
        found = flight.gather("machine", lambda: _of_this_machine(place), _EACH_NODE_S * len(_ON_EACH_NODE))
        machines = merged([Finding(**finding) for findings in found for finding in findings])
        device = device_of(layout.device_type, place, store, may_share=layout.backend == "gloo")
        world = flight.join(lambda: World(place, device, store=store, backend=layout.backend, timeout_s=asked.limit_s))
        flight.measure(device)
        code = int(flight.decide(lambda: exit_code([*machines, *flight.findings()])))
        world.close()
    except PreflightStoppedError:
        return EXIT_FAILURE
    except PreflightError as trouble:
        _print(asked, layout, flight.names, [*trouble.findings, *machines])
        if trouble.is_hang:
            raise  # so that whoever is stuck is ended too
        return EXIT_FAILURE
    if place.is_main:
        _print(asked, layout, flight.names, [*flight.findings(), *machines])
    return code


def _of_this_machine(place: RankInfo) -> list[dict[str, Any]]:
    """What is wrong with this node by itself; one of its workers looks."""
    if place.local_rank:
        return []
    found = [finding for finding in examine(_ON_EACH_NODE, limit_s=_EACH_NODE_S) if finding.level != "ok"]
    return [asdict(replace(finding, where=f"{place.host} {finding.where}".strip())) for finding in found]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The same finding on several nodes as one, with all of their names."""
    places: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        places.setdefault((finding.check, finding.level, finding.text, finding.fix), []).append(finding)
    return [
        replace(same[0], where=same[0].where if len(same) == 1 else f"{same[0].where} and {len(same) - 1} more")
        for same in places.values()
    ]


def _print(asked: Asked, layout: Layout, names: Names, findings: Sequence[Finding]) -> None:
    if asked.json:
        write_text(as_json(findings) + "\n", sys.stdout)
        return
    hosts = names.nodes(names.leaders) or "no node"
    shape = f"{counted(layout.world_size, 'worker')} on {counted(layout.num_nodes, 'node')}"
    write_text(f"stormo {__version__}: {shape}, {layout.backend}; {hosts}\n\n", sys.stdout)
    show(findings, sys.stdout)
    sys.stdout.flush()


def join_after_preflight(
    make: Callable[[], World],
    device: torch.device,
    config: TrainConfig,
    layout: Layout,
    place: RankInfo,
    store: Store | None,
    lifeline: FailureReporter,
) -> tuple[World, list[Notice]]:
    """Join the workers when their nodes reach one another, and measure them; what to tell, or the culprit raised."""
    from stormo.distributed.store import PeerFailedError

    flight = Preflight(
        place,
        store,
        backend=layout.backend,
        limits=Limits(arrival_s=config.workers.timeout),
        runs_folder=Path(config.run.runs_folder),
        needs_shared_folder=layout.spec.sharded_checkpoint,
        on_hang=lambda trouble: end_process(trouble, lifeline),
    )
    try:
        flight.connect()
        world = flight.join(make)
        flight.measure(device)
        flight.conclude()
    except PreflightStoppedError as stopped:
        raise PeerFailedError(str(stopped)) from None
    return world, notices_of(flight.measured, flight.findings())


def notices_of(measured: Measurements, findings: list[Finding]) -> list[Notice]:
    """One line when all is well, and one for each warning."""
    warnings = [finding for finding in findings if finding.level == "warning"]
    nodes = {worker.node for worker in measured.workers}
    parts = [f"{counted(len(measured.workers), 'worker')} on {counted(len(nodes), 'node')}"]
    if measured.overall is not None:
        parts.append(f"all-reduce {format_bytes(measured.overall.bus_bytes_per_s)}/s")
    if measured.between:
        parts.append(f"{format_bytes(min(link.bytes_per_s for link in measured.between))}/s or more between nodes")
    parts.append("no slow device or link" if not warnings else counted(len(warnings), "warning"))
    said = [Notice(kind="info", text=f"preflight: {', '.join(parts)}")]
    return said + [Notice(kind="warning", text=f"preflight: {sentence(finding)}") for finding in warnings]
