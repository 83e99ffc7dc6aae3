"""The command `stormo`: parses, imports one verb, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stormo.errors import EXIT_INTERRUPTED, SettingError, StormoError, full_disk, unknown_name
from stormo.system.early_signals import hold_warning, leave_when_interrupted, leave_when_told
from stormo.system.files import printable
from stormo.telemetry.text import discard, open_closed_streams
from stormo.version import __version__

_USAGE = """\
usage: stormo VERB ...

Trains a PyTorch model on one device or on thousands: fast, exact, and with its energy bill.

  stormo new FILE.py              write a task of your own to start from
  stormo train [TASK] [options]   train a built-in task, a file, or package.module:Class
  stormo run SCRIPT [options]     run your own script, which uses stormo.World, on all workers
  stormo runs                     list the runs in ./runs
  stormo show RUN                 one run: its settings, epochs and curves
  stormo report RUN...            one page on a run, or on several side by side
  stormo watch RUN                the same page, live while the run goes on
  stormo export RUN [FILE]        the weights of a run as one safetensors file
  stormo predict [TASK] [options] will it fit on GPUs that are not here, by which strategy and at which batch?
  stormo scale [TASK] [options]   train on more and more workers: do they pay, for time and for energy?
  stormo submit [TASK] [options]  train as a Slurm job, which resumes after each time limit until it is done
  stormo monitor                  GPUs, processors, memory, disks and network of this node, live or as CSV
  stormo doctor                   what is wrong with this machine, or with a job, and how to fix it

stormo VERB --help shows the options of a verb; stormo --version the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except StormoError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        full = full_disk(error)
        if full is None and not isinstance(error, BrokenPipeError):  # whose reader has gone (`| head`)
            raise
        discard(sys.stdout)
        return 0 if full is None else _fail(full)


def _fail(error: StormoError) -> int:
    print(f"stormo: {printable(str(error))}", file=sys.stderr)  # noqa: T201
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0].replace("_", "-") == f"--local-rank={os.environ.get('LOCAL_RANK')}":
        arguments = arguments[1:]  # torch.distributed.launch says it here too
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")  # noqa: T201
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"stormo {__version__}")  # noqa: T201
        return 0
    if arguments[0] in _REMOVED:
        raise SettingError(f"the verb {arguments[0]} was typed", "stormo no longer has it", _REMOVED[arguments[0]])
    verb = _VERBS.get(arguments[0])
    if verb is None:
        raise unknown_name("verb", arguments[0], _VERBS)
    return verb(arguments[1:])


def _train(arguments: list[str]) -> int:
    from stormo.launch.environments.detect import detect

    hold_warning()  # before what takes long to import
    leave_when_interrupted()
    with contextlib.suppress(StormoError):  # which `train` says better
        place = detect(os.environ)
        if place is None or place.world_size == 1:  # of several workers one must not leave alone
            leave_when_told()
    from stormo.commands import train

    return train.main(arguments)


def _new(arguments: list[str]) -> int:
    from stormo.commands import new
    from stormo.config.options import Parser

    parser = Parser(
        prog="stormo new", description="Write a task that trains as it is, to start from.", allow_abbrev=False
    )
    parser.add_argument("file", metavar="FILE.py", help="file to write; one that is there is left alone")
    kinds = "|".join(new.KINDS)
    parser.add_argument("--kind", default="classification", metavar=kinds, help="(default: classification)")
    parsed = parser.parse_args(arguments)
    return new.main(parsed.file, parsed.kind)


def _run(arguments: list[str]) -> int:
    from stormo.commands import run

    return run.main(arguments)


def _runs(arguments: list[str]) -> int:
    from stormo.commands import runs

    folder, as_json, _ = _listing("runs", "List the runs of a folder, newest first.", arguments, wants_name=False)
    return runs.main(folder, json=as_json)


def _show(arguments: list[str]) -> int:
    from stormo.commands import show

    folder, as_json, name = _listing("show", "Show one run.", arguments, wants_name=True)
    return show.main(folder, name, json=as_json)


def _listing(verb: str, description: str, arguments: list[str], *, wants_name: bool) -> tuple[Path, bool, str]:
    from stormo.config.options import Parser

    parser = Parser(prog=f"stormo {verb}", description=description, allow_abbrev=False)
    if wants_name:
        parser.add_argument("run", metavar="RUN", help="name of the run, or its folder")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    return Path(parsed.runs_folder), parsed.json, getattr(parsed, "run", "")


def _monitor(arguments: list[str]) -> int:
    from stormo.commands import monitor

    return monitor.main(arguments)


def _report(arguments: list[str]) -> int:
    from stormo.report import command

    return command.main(arguments)


def _watch(arguments: list[str]) -> int:
    from stormo.report import watch

    return watch.main(arguments)


def _export(arguments: list[str]) -> int:
    from stormo.commands import export

    return export.main(arguments)


def _predict(arguments: list[str]) -> int:
    from stormo.predict import command

    return command.main(arguments)


def _scale(arguments: list[str]) -> int:
    from stormo.study import command

    return command.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from stormo.doctor import command

    return command.main(arguments)


def _submit(arguments: list[str]) -> int:
    from stormo.submit import command

    return command.main(arguments)


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "new": _new,
    "train": _train,
    "run": _run,
    "runs": _runs,
    "show": _show,
    "report": _report,
    "watch": _watch,
    "export": _export,
    "predict": _predict,
    "scale": _scale,
    "submit": _submit,
    "monitor": _monitor,
    "doctor": _doctor,
}
_REMOVED = {
    "status": "squeue --me shows the jobs, tail -F runs/NAME/slurm.log the output of one",
    "cancel": "scancel JOB ends a job; its number is in runs/NAME/slurm.json",
}
