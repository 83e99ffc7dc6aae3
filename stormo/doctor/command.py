"""The verb `doctor`: examines this machine, or hands over to the doctor of a whole job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from stormo.config.options import Parser, options_of
from stormo.config.schema import Run, Workers
from stormo.doctor.apart import examine
from stormo.doctor.checks import CHECKS, Check
from stormo.doctor.finding import Finding, as_json, exit_code, show
from stormo.doctor.machine import Machine
from stormo.errors import SettingError, unknown_name
from stormo.launch.environments.detect import LAUNCHERS
from stormo.launch.rank_info import host_name
from stormo.system.cache import data_cache
from stormo.telemetry.text import write_text
from stormo.version import __version__

_JOB_FLAGS = tuple(option.flag for option in options_of("workers", Workers))


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and return the exit code: 1 where something is an error."""
    if _is_job(arguments, os.environ):
        from stormo.doctor import job

        return job.main(list(arguments))
    parsed = _parser().parse_args(arguments)
    names = _chosen(parsed.only, parsed.skip)
    folders = {"runs_folder": parsed.runs_folder, "data_folder": _data_folder(parsed.data_folder)}
    findings = examine(names, folders)
    if parsed.json:
        write_text(as_json(findings) + "\n", sys.stdout)
    else:
        system = os.uname()
        write_text(f"stormo {__version__} on {host_name()}, {system.sysname} {system.release}\n\n", sys.stdout)
        show(findings, sys.stdout)
    return exit_code(findings)


def _is_job(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether several workers are asked for, or a launcher has started this process as one of them."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    return bool(given & set(_JOB_FLAGS)) or any(launcher.detect(environ) for launcher in LAUNCHERS.values())


def _chosen(only: str | None, skip: str | None) -> list[str]:
    names = _names("--only", only) if only is not None else list(CHECKS)
    left_out = _names("--skip", skip) if skip is not None else []
    chosen = [name for name in CHECKS if name in names and name not in left_out]
    if not chosen:
        raise SettingError(
            f"--skip {skip} was set", "it leaves nothing of what is to be looked at", "leave a name out of it"
        )
    return chosen


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CHECKS:
            raise unknown_name(f"{flag}", name, CHECKS)
    if not names:
        raise SettingError(f"{flag} {text!r} was set", "it names no check", f"name some of: {', '.join(CHECKS)}")
    return names


def _data_folder(asked: str | None) -> str:
    if asked is None:
        return str(data_cache(os.environ))
    # In a process apart: a file system that does not answer is told of by the check of it, which has a limit.
    (found,) = examine(["folder"], {"data_folder": asked}, table=f"{__name__}:ASKED")
    if found.level == "note":
        raise SettingError(f"--data-folder {asked} was set", "there is no such folder", "check the path")
    return asked


def _is_there(machine: Machine) -> Iterator[Finding]:
    is_folder = machine.data_folder.expanduser().is_dir()
    yield Finding(check="folder", level="ok" if is_folder else "note", text=str(machine.data_folder))


ASKED = {"folder": Check(_is_there, 5.0)}  # before anything else is looked at


def _parser() -> Parser:
    parser = Parser(
        prog="stormo doctor",
        description="Look at this machine: what would slow a training, end it, or make its figures wrong, and how to "
        "mend it. With --num-nodes or --num-gpus, or under srun, mpirun or torchrun: at all workers of a job and the "
        "links between them.",
        epilog=f"checks: {', '.join(CHECKS)}. The exit code is 1 where something is an error, else 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--only", metavar="NAMES", help="look at these alone, with commas between them")
    parser.add_argument("--skip", metavar="NAMES", help="leave these out; storage writes up to 64 MB to each folder")
    parser.add_argument(
        "--runs-folder", default=Run.runs_folder, metavar="FOLDER", help="where runs go (default: %(default)s)"
    )
    parser.add_argument(
        "--data-folder", metavar="FOLDER", help="where data are read from (default: where stormo keeps what it fetched)"
    )
    return parser
