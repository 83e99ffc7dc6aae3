"""Starts workers ahead of time: they load torch while their agent reads the task, whose file often takes torch too.

Nothing depends on it. Workers that turn out not to be what the settings ask for, or that a mistake of the user makes
useless, end without a word, and others are started in the usual way.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stormo.errors import StormoError
from stormo.hardware import num_cores, visible_gpus
from stormo.launch import Node
from stormo.launch.detect import detect
from stormo.launch.waiting import WaitingWorkers
from stormo.layout import DEFAULT_PORT
from stormo.process import STARTED, process_start_unix_s

# With one of these, what is to be started, and where, is not told by the command line alone, or is nothing.
_NOT_WITH = (
    *("config", "dry_run", "launcher", "hosts", "hostfile", "max_restarts", "num_nodes", "node_id"),
    *("master_addr", "master_port", "print_commands"),
)


@contextmanager
def started_ahead(command: Sequence[str], flags: Mapping[str, Any]) -> Iterator[WaitingWorkers | None]:
    """The workers that a command line asks for, waiting; None where it does not pay or is not clear from it.

    Args:
        command: what a worker runs.
        flags: what the command line says, by name, as far as it can be read without the task.
    """
    workers = _start(command, flags)
    try:
        yield workers
    finally:
        if workers is not None:
            workers.close()


def _start(command: Sequence[str], flags: Mapping[str, Any]) -> WaitingWorkers | None:
    task = flags.get("task")
    if any(name in flags for name in _NOT_WITH) or not isinstance(task, str):
        return None
    if {"-h", "--help"} & set(command) or not takes_torch(Path(task.partition(":")[0])):
        return None
    try:
        if detect(os.environ) is not None:
            return None
        num_gpus = len(visible_gpus())
        num_workers = num_gpus if flags.get("num_gpus") is None else flags["num_gpus"]
        if not 2 <= num_workers <= max(num_gpus, num_cores()):  # a number that is a mistake must not start so many
            return None
        # torch reads how much it shall say as it is imported.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, STARTED: str(process_start_unix_s())}
        return WaitingWorkers(command, Node(num_workers=num_workers, master_port=DEFAULT_PORT), environ)
    except (OSError, StormoError):
        return None  # said when they are started in the usual way


def takes_torch(path: Path) -> bool:
    """Whether a file imports torch at its top, and not with variables of its own that torch might read just then."""
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # said when it is imported
    names = set(_names_at_import(tree))
    return "torch" in names and not {"environ", "putenv"} & names


def _names_at_import(node: ast.AST) -> Iterator[str]:
    """What is imported and named where a file runs as it is imported: everywhere but in functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _names_at_import(child)
