"""Runs a stormo command for a Python program or a notebook: output goes to its cell, errors become exceptions.

The program itself joins no group and touches no GPU: it starts the command that a user would type.
"""

from __future__ import annotations

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from stormo.config.options import train_options
from stormo.errors import ERROR_FILE, EXIT_USAGE, RunFailedError, SettingError, StormoError
from stormo.system.process import stormo_command

_MAX_LAST_CHARACTERS = 4000
_NUM_POLITE = 2  # the first Ctrl-C saves and stops, the second stops at once; a third kills
_LOOK_S = 0.5
_END_S = 60.0  # for the command to save and to end its workers
_TEXTS = ("run_name", "runs_folder", "config")  # read here; the command checks numbers and other texts


def refuse_in_worker(call: str) -> None:
    """Refuse to start workers in a worker, which imports the file that its task or function is in."""
    if ERROR_FILE in os.environ:
        raise SettingError(
            f"{call} was called in a worker",
            "every worker imports the file of its task or function",
            'put the call under if __name__ == "__main__":',
        )


def given_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not None, paths as text; refuses types that no flag can say."""
    given = {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in settings.items()
        if value is not None
    }
    for option in train_options():
        value = given.get(option.name)
        is_switch = isinstance(value, bool) or option.kind is bool
        if value is None or (value is True and option.optional_value):
            continue
        if is_switch or option.name in _TEXTS:
            option.convert(value, option.name)
    return given


def run_command(verb: str, arguments: Sequence[str]) -> None:
    """Run a verb to its end, show what it prints, and raise what made it fail."""
    with tempfile.TemporaryDirectory(prefix="stormo-") as folder:
        error_file = Path(folder, "error.json")
        process = subprocess.Popen(
            [*stormo_command(verb), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if _is_terminal() else subprocess.PIPE,  # rank 0 draws its progress on a terminal
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_paths()), ERROR_FILE: str(error_file)},
            start_new_session=True,  # a Ctrl-C of the terminal comes once, through this process
        )
        with process:
            try:
                last_text, num_interrupts = _show_output(process)
            except BaseException:
                _end(process)
                raise
        if num_interrupts:
            raise KeyboardInterrupt
        if process.returncode:
            raise _error(error_file, process.returncode, last_text)


def _is_terminal() -> bool:
    terminal = sys.__stdout__  # a notebook writes elsewhere
    return terminal is not None and terminal is sys.stdout and terminal.isatty()


def _import_paths() -> list[str]:
    """Where this process finds its modules, without Python's own and installed ones."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    paths = [os.path.abspath(entry) for entry in sys.path if not entry.endswith(".zip")]  # noqa: PTH100 - "" is here
    return list(dict.fromkeys(path for path in paths if not path.startswith(installed)))


def _show_output(process: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Show the output until the process ends; what it wrote last on stderr, and how often it was interrupted."""
    last_text, num_interrupts = "", 0
    with selectors.DefaultSelector() as selector:
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                selector.register(pipe, selectors.EVENT_READ, (target, decoder))
        while selector.get_map():
            try:
                ready = selector.select(_LOOK_S)
                for key, _ in ready:
                    text = _show_chunk(selector, key)
                    if key.fileobj is process.stderr:
                        last_text = (last_text + text)[-_MAX_LAST_CHARACTERS:]
                if not ready and process.poll() is not None:
                    break  # what outlives it may hold its pipes open
            except KeyboardInterrupt:
                num_interrupts += 1
                process.send_signal(signal.SIGINT if num_interrupts <= _NUM_POLITE else signal.SIGKILL)
    return last_text, num_interrupts


def _show_chunk(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> str:
    target: IO[str]
    target, decoder = key.data
    chunk = os.read(key.fd, 64 * 1024)
    if not chunk:
        selector.unregister(key.fileobj)
    text: str = decoder.decode(chunk, final=not chunk)
    target.write(text)
    target.flush()
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command whose output cannot be shown any more."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _error(error_file: Path, exit_code: int, last_text: str) -> StormoError:
    """The error that the command has noted or, without one, the last line that it wrote."""
    try:
        noted: dict[str, Any] = json.loads(error_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        lines = last_text.strip().splitlines()
        return RunFailedError(lines[-1] if lines else f"the command ended with exit code {exit_code}", exit_code)
    text = str(noted["text"])
    if noted["exit_code"] != EXIT_USAGE:
        return RunFailedError(text, exit_code)
    error = SettingError(*(noted["parts"] or (text, "", "")))
    error.args = (text,)
    return error
