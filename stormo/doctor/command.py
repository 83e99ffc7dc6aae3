"""The verb `doctor`: checks this machine, or all workers of a job and the links between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stormo.config.layout import Layout, at_least, check_timeout, resolve_layout
from stormo.config.options import Parser, dashed, make_config, options_of
from stormo.config.schema import CALL_ONLY, NodeRange, Run, TrainConfig, Workers
from stormo.doctor import slices
from stormo.doctor.check_runner import CHECKS, run_checks
from stormo.doctor.finding import Finding, as_json, exit_code, grouped, show
from stormo.doctor.measure import require_rendezvous
from stormo.doctor.preflight import Limits, Preflight, PreflightError, PreflightStoppedError, end_process, watchdog
from stormo.errors import EXIT_FAILURE, SettingError, StormoError, pluralize, unknown_name
from stormo.launch import AgentTimeouts, FailureReporter, RankInfo, alone, open_failure_reporter, run_node
from stormo.launch.environments.detect import LAUNCHERS
from stormo.launch.hosts import hosts_of, start_on_hosts
from stormo.launch.nodes import equal_settings, find_rank_info, launched_by, node_of
from stormo.launch.rank_info import host_name
from stormo.launch.slices import take_slice
from stormo.system.files import data_cache
from stormo.system.hardware import Gpu, visible_gpus
from stormo.system.process import stormo_command
from stormo.telemetry.text import write_text
from stormo.version import __version__

_CODE_FILE = "STORMO_DOCTOR_CODE"  # into which the first worker of a node writes the exit code for its agent
_JOB_FLAGS = ("num_gpus", "num_nodes", "node_id", "master_addr", "master_port", "device", "backend", *CALL_ONLY)
_NODE_CHECKS = ("devices", "network", "limits")  # fast ones that write nothing
_NODE_CHECK_S = 20.0
_LEAST_LIMIT_S = 10.0
_INTERRUPTED_S = 1.0  # to delete what was written


def main(arguments: Sequence[str]) -> int:
    """Check, print, and return the exit code: 1 if there is an error."""
    if _is_job(arguments, os.environ):
        return check_job(list(arguments))
    parsed = _parser().parse_args(arguments)
    if parsed.slices is not None:
        return _slices(parsed.slices, as_document=parsed.json)
    names = _chosen(parsed.only, parsed.skip)
    folders = {"runs_folder": parsed.runs_folder, "data_folder": _data_folder(parsed.data_folder)}
    findings = run_checks(names, folders)
    system = os.uname()
    title = f"stormo {__version__} on {host_name()}, {system.sysname} {system.release}"
    _print(findings, title, as_document=parsed.json)
    return exit_code(findings)


def _slices(asked: str, *, as_document: bool) -> int:
    if asked:
        if not asked.isdecimal():
            why = "it is no whole number from 0 on"
            raise SettingError(f"--slices {asked} was set", why, "set --slices 7, or 0 to undo it")
        slices.cut(int(asked), say=lambda line: write_text(f"{line}\n", sys.stderr))
    write_text(slices.show_slices(as_document=as_document), sys.stdout)
    return 0


def _is_job(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether several workers are asked for, or a launcher has started this process as one of them."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    flags = {option.flag for option in options_of("workers", Workers)}
    if "--slices" in given:  # of this machine, in a shell of a Slurm job too
        if found := ", ".join(sorted(given & flags)):
            why = "--slices cuts the GPU of this machine and starts no workers"
            raise SettingError(f"{found} was set with --slices", why, f"leave out {found}")
        return False
    return bool(given & flags) or any(launcher.detect(environ) for launcher in LAUNCHERS.values())


def _chosen(only: str | None, skip: str | None) -> list[str]:
    names = _names("--only", only) if only is not None else list(CHECKS)
    skipped = _names("--skip", skip) if skip is not None else []
    chosen = [name for name in CHECKS if name in names and name not in skipped]
    if not chosen:
        raise SettingError(f"--skip {skip} was set", "it leaves no check", "leave a name out of it")
    return chosen


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CHECKS:
            raise unknown_name(flag, name, CHECKS)
    if not names:
        raise SettingError(f"{flag} {text!r} was set", "it names no check", f"name some of: {', '.join(CHECKS)}")
    return names


def _data_folder(asked: str | None) -> str:
    if asked is None:
        return str(data_cache(os.environ))
    # In a subprocess: the storage check, which has a limit, names a file system that does not answer.
    (found,) = run_checks(["folder"], {"data_folder": asked}, table="stormo.doctor.check_runner:FLAG_CHECKS")
    if found.level == "note":
        raise SettingError(f"--data-folder {asked} was set", "there is no such folder", "check the path")
    return asked


def _parser() -> Parser:
    parser = Parser(
        prog="stormo doctor",
        description="Check this machine: what would slow a training, end it, or make its figures wrong, and how to "
        "fix it. With --num-nodes or --num-gpus, or under srun, mpirun or torchrun: check all workers of a job and "
        "the links between them.",
        epilog=f"checks: {', '.join(CHECKS)}. The exit code is 1 if there is an error, else 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="NAMES", help="run only these checks, separated by commas")
    parser.add_argument("--skip", metavar="NAMES", help="leave these out; storage writes up to 64 MB to each folder")
    parser.add_argument(
        "--data-folder", metavar="FOLDER", help="where data are read from (default: where stormo keeps what it fetched)"
    )
    parser.add_argument(
        "--slices",
        nargs="?",
        const="",
        metavar="N",
        help="show what the GPUs can be cut into (MIG); with N, cut the GPU into N slices; with 0, undo it",
    )
    _add_common_flags(parser)
    return parser


def _add_common_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument(
        "--runs-folder", default=Run.runs_folder, metavar="FOLDER", help="where runs go (default: %(default)s)"
    )


def _print(findings: Sequence[Finding], title: str, *, as_document: bool) -> None:
    if as_document:
        write_text(as_json(findings) + "\n", sys.stdout)
        return
    write_text(f"{title}\n\n", sys.stdout)
    show(findings, sys.stdout)
    sys.stdout.flush()


def check_job(arguments: list[str]) -> int:
    """Start the workers of a job, or be one of them, and measure."""
    config, is_json = _parse_job(arguments)
    rank_info = find_rank_info(config)
    take_slice(rank_info, config.workers.device)
    if hosts := hosts_of(config):
        return start_on_hosts(config, hosts, "doctor", arguments)
    layout = resolve_layout(config, gpus_within(config.workers.timeout), launched_by(rank_info))
    if rank_info is None and layout.world_size > 1:
        return _start_workers(arguments, config, layout)
    return _work(config, layout, rank_info or alone(), as_document=is_json)


def gpus_within(limit_s: float) -> list[Gpu]:
    """The GPUs of this machine; ends this process if the driver does not answer in time."""

    def give_up() -> None:
        text = f"stormo: the driver of the GPUs on host {host_name()} did not answer within {limit_s:g} s; "
        text += "look at the kernel log (dmesg) there, and whether nvidia-smi answers.\n"
        write_text(text, sys.stderr)
        os._exit(EXIT_FAILURE)

    timer = watchdog(limit_s, give_up)
    timer.start()
    try:
        return visible_gpus()
    finally:
        timer.cancel()


def _parse_job(arguments: Sequence[str]) -> tuple[TrainConfig, bool]:
    """The settings of the job, whose timeout is `--limit-s`, and whether to print JSON."""
    parser = Parser(
        prog="stormo doctor",
        description="Measure all workers of a job and the links between them. Start it as you would start a training: "
        "on every node, or under srun, mpirun or torchrun.",
        epilog="The exit code is 1 if there is an error, else 0.",
        allow_abbrev=False,
    )
    options = [option for option in options_of("workers", Workers) if option.name in _JOB_FLAGS]
    for option in options:
        if option.kind is bool:
            parser.add_argument(option.flag, dest=option.key, action="store_true", default=None, help=option.help)
            continue
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else "TEXT" if option.kind is str else "N"
        parser.add_argument(option.flag, dest=option.key, metavar=metavar, help=option.help)
    parser.add_argument("--limit-s", metavar="X", default="60", help="seconds for all of it (default: %(default)s)")
    _add_common_flags(parser)
    parsed = parser.parse_args([dashed(argument) for argument in arguments])
    given = {option.key: getattr(parsed, option.key) for option in options}
    settings = {
        option.key: option.convert(given[option.key], option.flag)
        for option in options
        if given[option.key] is not None
    }
    if isinstance(settings.get("num_nodes"), NodeRange):
        raise SettingError(
            f"--num-nodes {settings['num_nodes']} was set",
            "the doctor checks a fixed number of nodes",
            "set a number",
        )
    timeout = next(option for option in options_of("workers", Workers) if option.name == "timeout")
    limit_s = timeout.convert(parsed.limit_s, "--limit-s")
    at_least("--limit-s", limit_s, _LEAST_LIMIT_S)
    check_timeout("--limit-s", limit_s)
    return make_config({**settings, "timeout": limit_s, "runs_folder": parsed.runs_folder}, None), parsed.json


def _start_workers(arguments: list[str], config: TrainConfig, layout: Layout) -> int:
    """Become the agent of this node; the workers run the same command, with their ranks in the environment."""
    command = [*stormo_command("doctor"), *arguments]
    # A file in memory, which is gone when this process ends.
    with os.fdopen(os.memfd_create("stormo-doctor"), "rb") as code_file:
        environ = {**os.environ, _CODE_FILE: f"/proc/{os.getpid()}/fd/{code_file.fileno()}"}
        timeouts, limit_s = AgentTimeouts(interrupted_s=_INTERRUPTED_S), config.workers.timeout
        same = equal_settings({"--limit-s": f"{limit_s:g}"}, layout)
        node = node_of(config, layout)
        code = run_node(command, node, timeout_s=limit_s, environ=environ, timeouts=timeouts, **same)
        return code or int(code_file.read() or b"0")


def _work(config: TrainConfig, layout: Layout, rank_info: RankInfo, *, as_document: bool) -> int:
    """Be a worker; report any failure to the others before this process ends."""
    limit_s = config.workers.timeout
    reporter = open_failure_reporter(rank_info) if rank_info.launcher in ("local", "alone") else None
    code_file = os.environ.pop(_CODE_FILE, None)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every name they cannot look up
    if as_document:
        os.environ.setdefault("NCCL_DEBUG_FILE", "/dev/stderr")  # NCCL would write into the document
    try:
        from stormo.distributed.store import Store, address_book_of

        require_rendezvous(rank_info)
        if reporter is None:
            same = equal_settings({"--limit-s": f"{limit_s:g}"}, layout)
            address_book = address_book_of(rank_info, limit_s)
            reporter = open_failure_reporter(rank_info, address_book=address_book, timeout_s=limit_s, **same)
        store = Store(rank_info, limit_s, reporter.store_address) if rank_info.world_size > 1 else None
        code = _measure_job(config, layout, rank_info, store, reporter, as_document=as_document)
    except Exception as error:
        if reporter is None or not reporter.shows_failures:
            raise
        from stormo.distributed.store import is_secondary

        reporter.report_failure(error, secondary=is_secondary(error))
        return error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE
    reporter.close()
    if code_file is None:
        return code
    if rank_info.local_rank == 0:
        Path(code_file).write_text(str(code), encoding="utf-8")
    return 0


def _measure_job(
    config: TrainConfig,
    layout: Layout,
    rank_info: RankInfo,
    store: Any,
    reporter: FailureReporter,
    *,
    as_document: bool,
) -> int:
    """Run all phases; print the findings on rank 0, and return the exit code on all ranks."""
    from stormo.distributed.devices import device_of, share_cores
    from stormo.distributed.world import World

    def print_findings(findings: Sequence[Finding]) -> None:
        nodes = preflight.names.nodes(preflight.names.leaders) or "no node"
        shape = f"{pluralize(layout.world_size, 'worker')} on {pluralize(layout.num_nodes, 'node')}"
        _print(findings, f"stormo {__version__}: {shape}, {layout.backend}; {nodes}", as_document=as_document)

    def on_hang(error: PreflightError) -> None:
        print_findings(error.findings)
        end_process(error, reporter)

    limit_s = config.workers.timeout
    preflight = Preflight(
        rank_info,
        store,
        backend=layout.backend,
        limits=Limits(arrival_s=limit_s, one_measurement_s=0.4, all_rounds_s=15.0, whole_s=limit_s),
        runs_folder=Path(config.run.runs_folder),
        needs_shared_folder=False,
        on_hang=on_hang,
    )
    share_cores(rank_info)
    machines: list[Finding] = []
    try:
        preflight.connect()
        found = preflight.gather("machine", lambda: _check_node(rank_info), _NODE_CHECK_S * len(_NODE_CHECKS))
        machines = merged([Finding(**finding) for findings in found for finding in findings])
        device = device_of(layout.device_type, rank_info, store, may_share=layout.may_share)
        world = preflight.join(lambda: World(rank_info, device, store=store, backend=layout.backend, timeout_s=limit_s))
        preflight.measure(device)
        code = int(preflight.decide(lambda: exit_code([*machines, *preflight.findings()])))
        world.close()
    except PreflightStoppedError:
        return EXIT_FAILURE
    except PreflightError as error:
        print_findings([*error.findings, *machines])
        if error.is_hang:
            raise  # so that ranks that hang are ended too
        return EXIT_FAILURE
    if rank_info.is_main:
        print_findings([*preflight.findings(), *machines])
    return code


def _check_node(rank_info: RankInfo) -> list[dict[str, Any]]:
    """What the checks of one machine find on this node; its first worker runs them."""
    if rank_info.local_rank:
        return []
    found = [finding for finding in run_checks(_NODE_CHECKS, limit_s=_NODE_CHECK_S) if finding.level != "ok"]
    return [asdict(replace(finding, where=f"{rank_info.host} {finding.where}".strip())) for finding in found]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The same finding on several nodes as one."""
    groups = grouped(findings, lambda finding: (finding.check, finding.level, finding.text, finding.fix))
    return [
        replace(same[0], where=same[0].where if len(same) == 1 else f"{same[0].where} and {len(same) - 1} more")
        for same in groups.values()
    ]
