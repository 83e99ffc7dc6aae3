"""`subprocess.Popen` for Python programs, by forks of a server that has imported torch.

A command of several workers starts as many processes, and each would spend seconds on that import. The server makes the
first one; the Python programs that it starts, and those in turn, are forks too. Each runs as if it were new: with
modules, descriptors, variables and signal handlers of its own. Only `/proc` still shows the server's words and
variables; `noted` knows those of the program.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, process, reduction, resource_tracker, util
from pathlib import Path
from typing import Any

from stormo.system.process import start_ticks

STORMO = str(Path(sys.executable).with_name("stormo"))
# The compiler too, which DDP and the optimizers of torch import.
PRELOAD = ["torch", "torch._dynamo", "stormo.data.loaders", "stormo.training.trainer", "tests.forked"]
NOTES = "FORKED_NOTES"
_ROOT = str(Path(__file__).parents[1])
_MainProcess = type(multiprocessing.current_process())  # of the server, which imports this module
_spawned = util.spawnv_passfds
_executed: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = list(inspect.signature(_executed).parameters)[2:]  # after the words


def take_interrupts() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and every program under test would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(function: Callable[..., None], arguments: tuple[Any, ...], *, is_daemon: bool = False) -> Any:
    """A process that calls a function of a module; the server is started with the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # here, as the loaders of the product say what they need there
    started = context.Process(target=function, args=arguments, daemon=is_daemon)
    started.start()
    return started


def start_server() -> None:
    """Fork the server too, from a process that has imported what it needs."""
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork_server
    try:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _spawned


def _fork_server(_: str, words: Sequence[str], fds: Sequence[int]) -> int:
    """For `spawnv_passfds` of multiprocessing: the last of the words are what the server does."""
    pid = os.fork()
    if pid == 0:
        _close_descriptors(fds)
        util.spawnv_passfds = _spawned
        forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        try:
            exec(words[-1], {})
        finally:
            os._exit(0)
    return pid


def run(words: Sequence[str], timeout_s: float = 240.0, **named: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, with the output as text."""
    pipe = subprocess.PIPE
    with Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **named) as started:
        try:
            out, err = started.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
    return subprocess.CompletedProcess(list(words), started.returncode, out, err)


class Popen(subprocess.Popen[Any]):
    """A Python program, `[sys.executable, …]` or `[STORMO, …]`, in a fork of the server; others are executed."""

    _started: Any = None

    def _execute_child(self, words: Any, *rest: Any) -> None:
        named = dict(zip(_PARAMETERS, rest, strict=True))
        if not _is_python(words):
            _executed(self, words, *rest)
            return
        self._started = fork(_start, (_start_of(words, named, _Sent),))
        _has_started(self, self._started.pid, named)

    def _internal_poll(self, **named: Any) -> int | None:
        if self._started is None:
            return super()._internal_poll(**named)  # type: ignore[misc,no-any-return]
        self.returncode = self._started.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._started is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        self._started.join(timeout)
        if self._started.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = self._started.exitcode
        return self.returncode


def _fork_or_execute(self: Any, words: Any, *rest: Any) -> None:
    """For `subprocess.Popen._execute_child` in a forked program."""
    named = dict(zip(_PARAMETERS, rest, strict=True))
    if not _is_python(words):
        _executed(self, words, *rest)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent, of which the program has none
        pid = os.fork()
    if pid == 0:
        _forget_modules()
        _start(_start_of(words, named, int))
    _has_started(self, pid, named)


def _is_python(words: Any) -> bool:
    return isinstance(words, list | tuple) and words[0] in (sys.executable, STORMO)


def _has_started(started: Any, pid: int, named: Mapping[str, Any]) -> None:
    started.pid, started._child_created = pid, True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    started._close_pipe_fds(*(named[name] for name in pipes))


class _Sent(int):
    """A descriptor that the server hands to the process it forks."""

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(int(self)),)


def _received(sent: Any) -> int:
    fd: int = sent.detach()
    return fd


@dataclass(frozen=True, kw_only=True)
class _Program:
    """What a new process gets."""

    words: list[str]
    folder: str
    environ: dict[str, str]
    streams: list[int]
    pass_fds: list[int]
    new_session: bool
    process_group: int
    first: Callable[[], None] | None


def _start_of(words: Sequence[str], named: Mapping[str, Any], kind: type[int]) -> _Program:
    fds = (named["p2cread"], named["c2pwrite"], named["errwrite"])
    return _Program(
        words=list(words),
        folder=str(named["cwd"] or Path.cwd()),
        environ=dict(os.environ if named["env"] is None else named["env"]),
        streams=[kind(target if fd == -1 else fd) for target, fd in enumerate(fds)],
        pass_fds=[kind(fd) for fd in named["pass_fds"]],
        new_session=named["start_new_session"],
        process_group=named["process_group"],
        first=named["preexec_fn"],
    )


def _forget_modules() -> None:
    """The program imports again what its parent may have changed: all but torch and what else is installed."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_installed = "site-packages" in file or file.startswith(sys.base_prefix)
        if file and not is_installed and name not in ("__main__", __name__):
            del sys.modules[name]


def _start(program: _Program) -> None:
    """Make this fork the program, and end with it."""
    code = 1
    try:
        gc.disable()  # what is collected before the old descriptors are forgotten could close new ones
        _take_descriptors(program.streams, program.pass_fds)
        if program.new_session:
            os.setsid()
        if program.process_group >= 0:
            os.setpgid(0, program.process_group)
        if program.first is not None:
            program.first()
        os.chdir(program.folder)
        os.environ.clear()
        os.environ.update(program.environ)
        _note(program)
        _reset_process()
        gc.freeze()
        gc.enable()
        code = _call(program.words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _note(program: _Program) -> None:
    if folder := os.environ.get(NOTES):
        path = Path(folder, f"{os.getpid()}-{start_ticks(os.getpid())}")
        path.with_suffix(".new").write_text(json.dumps([program.words, program.environ]), encoding="utf-8")
        path.with_suffix(".new").rename(path)


def noted(folder: str, pid: int) -> tuple[list[str], dict[str, str]] | None:
    """The words and variables of a forked program that was given this folder as its variable NOTES."""
    path = Path(folder, f"{pid}-{start_ticks(pid)}")
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _take_descriptors(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    for target, fd in enumerate([os.dup(fd) for fd in streams]):
        os.dup2(fd, target)
    _close_descriptors(pass_fds)
    for fd in pass_fds:
        os.set_inheritable(fd, True)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _close_descriptors(kept: Sequence[int]) -> None:
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _reset_process() -> None:
    """Signal handlers, what is done at the end, children, and the servers of multiprocessing."""
    signal.set_wakeup_fd(-1)
    for number in signal.Signals:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # what the parent will remove at its end
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    for end in (logging.shutdown, weakref.finalize._exitfunc, util._exit_function):  # type: ignore[attr-defined]
        atexit.register(end)
    process._current_process = _MainProcess()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def _call(words: list[str]) -> int:
    """Run the program to its end; its exit code."""
    words = ["-P", "-m", "stormo", *words[1:]] if words[0] == STORMO else words[1:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in (_ROOT, *paths)), _ROOT]
    flags = set()
    while words[0] in ("-u", "-P"):
        flags.add(words.pop(0))
    if "-u" in flags or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        _run_main(words, is_safe="-P" in flags)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, _of_program(error.__traceback__))
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return 0


def _run_main(words: list[str], *, is_safe: bool) -> None:
    kind, *rest = words
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = rest
        sys.path[:0] = [] if is_safe else [str(Path.cwd())]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def _of_program(at: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from the program's own first line on."""
    while at is not None and at.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        at = at.tb_next
    return at
