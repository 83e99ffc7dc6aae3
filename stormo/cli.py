"""The command `stormo`: parses, imports one verb, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from stormo.errors import (
    ERROR_FILE,
    EXIT_INTERRUPTED,
    SettingError,
    StormoError,
    full_disk,
    note_error,
    unknown_name,
)
from stormo.system.files import printable
from stormo.system.process import collect_rarely, die_with_parent
from stormo.system.signals import defer_sigusr1, exit_on_sigint, exit_on_sigterm
from stormo.telemetry.text import discard, open_closed_streams
from stormo.version import __version__

_USAGE = """\
usage: stormo VERB ...

Trains a PyTorch model on one device or on thousands: fast, exact, and with its energy bill.

  stormo new FILE.py              write a task of your own to start from
  stormo train [TASK] [options]   train a built-in task, a file, or package.module:Class
  stormo run SCRIPT [options]     run your own script, which uses stormo.World, on all workers
  stormo runs                     list the runs in ./runs
  stormo show [RUN]               one run, or the newest: its settings, epochs and curves
  stormo report [RUN...]          one page on a run, the newest, or several side by side
  stormo watch [RUN]              the same page, live while the run trains
  stormo evaluate RUN [options]   the validation metrics of a run's checkpoint, on any number of workers
  stormo export RUN [FILE]        the weights of a run as one safetensors file, or its model for torch.export or ONNX
  stormo predict [TASK] [options] will it fit on GPUs that are not here, by which strategy and at which batch?
  stormo scale [TASK] [options]   train on more and more workers: do they pay, for time and for energy?
  stormo submit [TASK] [options]  train as a Slurm job, which resumes after each time limit until it is done
  stormo monitor                  GPUs, processors, memory, disks and network of this node, live or as CSV
  stormo doctor                   what is wrong with this machine, or with a job, and how to fix it
  stormo completion SHELL         a script that completes these verbs and their options: bash, zsh or fish

stormo VERB --help shows the options of a verb; stormo --version the versions of stormo, torch and Python.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if ERROR_FILE in os.environ:
        die_with_parent(signal.SIGTERM)  # a notebook whose kernel was killed: save and stop
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
    parts = (error.what, error.why, error.instead) if isinstance(error, SettingError) else None
    note_error(printable(str(error)), error.exit_code, parts)
    lines = [f"stormo: {printable(str(error))}", *getattr(error, "__notes__", ())]
    print("\n".join(lines), file=sys.stderr)  # noqa: T201
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0].replace("_", "-") == f"--local-rank={os.environ.get('LOCAL_RANK')}":
        arguments = arguments[1:]  # torch.distributed.launch says it here too
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")  # noqa: T201
        return 0
    if arguments[0] in ("-V", "--version"):
        print(_versions())  # noqa: T201
        return 0
    verb = _VERBS.get(arguments[0])
    if verb is None:
        raise unknown_name("verb", arguments[0], _VERBS)
    return verb(arguments[1:])


def _versions() -> str:
    """What an issue should name, without importing torch."""
    from importlib import metadata

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "without torch"
    return f"stormo {__version__}, {torch}, Python {sys.version.split()[0]}"


def _prepare_worker() -> None:
    """Answer signals before what takes long to import, in a process that may be one of several workers."""
    from stormo.launch.environments.detect import detect

    defer_sigusr1()
    exit_on_sigint()
    with contextlib.suppress(StormoError):  # the verb reports it
        rank_info = detect(os.environ)
        if rank_info is None or rank_info.world_size == 1:  # one of several workers must not leave alone
            exit_on_sigterm()


def _completion(arguments: list[str]) -> int:
    from stormo.commands import completion

    return completion.main(arguments, _VERBS)


def _verb(module: str, *, has_workers: bool = False) -> Callable[[list[str]], int]:
    """A verb whose module is imported when it is typed."""

    def run(arguments: list[str]) -> int:
        if has_workers:
            _prepare_worker()
            collect_rarely()
        code: int = importlib.import_module(module).main(arguments)
        return code

    return run


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "new": _verb("stormo.commands.new"),
    "train": _verb("stormo.commands.train", has_workers=True),
    "run": _verb("stormo.commands.run"),
    "runs": _verb("stormo.commands.runs"),
    "show": _verb("stormo.commands.show"),
    "report": _verb("stormo.report.command"),
    "watch": _verb("stormo.report.watch"),
    "evaluate": _verb("stormo.commands.evaluate", has_workers=True),
    "export": _verb("stormo.commands.export"),
    "predict": _verb("stormo.predict.command"),
    "scale": _verb("stormo.study.command"),
    "submit": _verb("stormo.submit.command"),
    "monitor": _verb("stormo.commands.monitor"),
    "doctor": _verb("stormo.doctor.command"),
    "completion": _completion,
}
