"""`stormo export RUN`: the weights of a checkpoint as one safetensors file, or its model as one program."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from stormo.commands.trained_run import find_checkpoint, read_run, run_of, split_task_flags
from stormo.config.options import Parser
from stormo.errors import SettingError, pluralize
from stormo.system.files import sync_folder
from stormo.telemetry.text import format_bytes, write_text

_SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
_Result = TypeVar("_Result")


def main(arguments: Sequence[str]) -> int:
    """Read the weights, write what was asked for, and say what was written."""
    own, task_flags = split_task_flags(arguments)
    asked = _parser().parse_intermixed_args(own)  # FILE may follow an option
    runs_folder, kind = Path(asked.runs_folder), asked.format
    if task_flags and kind == "safetensors":
        why = "a safetensors file holds the weights as they were saved"
        raise SettingError(f"{task_flags[0]} was set", why, "leave it out, or set --format torch-export")
    name, path = find_checkpoint(asked.source, runs_folder, is_best=asked.best, step=asked.step)
    file = Path(asked.file or f"{name}-{path.name.partition('.')[0]}{_SUFFIXES[kind]}")
    _require_free(file, may_replace=asked.force)
    if kind == "safetensors":
        lines = _export_weights(path, file)
    else:
        lines = _export_program(asked.source, runs_folder, path, file, kind, task_flags)
    write_text("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="stormo export",
        description="Write the weights of a checkpoint, named as in model.state_dict(), into one safetensors file; or "
        "its model as a program that runs without its Python code. --task.… flags change the options of the task whose "
        "validation data the program is traced and compared with.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="RUN", help="name of a run, its folder, or one checkpoint")
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="file to write (default: RUN-step-….safetensors in this folder)"
    )
    parser.add_argument(
        "--format",
        choices=tuple(_SUFFIXES),
        default="safetensors",
        help="the weights, or the model for torch.export.load or ONNX (default: safetensors)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint of the best epoch (default: the newest)")
    which.add_argument("--step", type=int, metavar="STEP", help="the checkpoint of this step")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    return parser


def _export_weights(path: Path, file: Path) -> list[str]:
    from stormo.checkpoint import weights_digest
    from stormo.checkpoint.tensors import Encoded
    from stormo.checkpoint.writer import write_file
    from stormo.training.trained_model import read_weights

    step, weights = read_weights(path)
    # By "format" other programs know that these are weights of torch.
    encoded = Encoded(weights, {"format": "pt", "stormo_step": str(step)})
    _publish(file, ".safetensors", lambda temporary: write_file(temporary, encoded))
    return [
        f"weights   {file}  ({format_bytes(encoded.size_bytes)}, {pluralize(len(weights), 'tensor')}, step {step})",
        f"digest    {weights_digest(weights)}",
    ]


def _export_program(
    source: str, runs_folder: Path, path: Path, file: Path, kind: str, task_flags: Sequence[str]
) -> list[str]:
    import torch

    from stormo.tasks.check import check_init
    from stormo.training.model_export import check_packages, export_model
    from stormo.training.trained_model import make_trained, read_weights

    check_packages(kind)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints
        config, task_class = read_run(run_of(source, runs_folder), "stormo export", {}, task_flags)
        task = task_class(config.task_options)
        check_init(task)
        step, weights = read_weights(path)
        task.fetch()
        task.datasets()  # before the model, as in a training
        precision = config.speed.precision
        torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
        model = make_trained(task, weights, str(path), precision)
        made = _publish(file, _SUFFIXES[kind], lambda temporary: export_model(task, model, kind, temporary))
    batch = "batches of any size" if made.fixed_batch is None else f"batches of {made.fixed_batch} only"
    return [
        f"program   {file}  ({format_bytes(file.stat().st_size)}, {kind}, {batch}, step {step})",
        f"check     its outputs differ from the model's by at most {made.difference:.2g} "
        f"(allowed: {made.tolerance:.2g})",
    ]


def _require_free(file: Path, *, may_replace: bool) -> None:
    if file.is_dir() or (file.exists() and not file.is_file()):
        raise SettingError(f"{file} was to be written", "it is no ordinary file", "name another one")
    if file.exists() and not may_replace:
        raise SettingError(f"{file} was to be written", "it is there already", "name another file, or set --force")


def _publish(file: Path, suffix: str, write: Callable[[Path], _Result]) -> _Result:
    """Write a file of which a reader sees all or nothing, even after a power cut."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{suffix}")
    try:
        result = write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise SettingError(
            f"{file} was to be written", f"it cannot be ({error.strerror})", "make room, or name another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the first error was reported already
            temporary.unlink(missing_ok=True)
    return result
