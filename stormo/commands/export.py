"""`stormo export RUN`: the weights of a checkpoint as one plain safetensors file, whatever mesh has saved them."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stormo.config.options import Parser
from stormo.errors import SettingError, pluralize
from stormo.telemetry.text import format_bytes, write_text

if TYPE_CHECKING:
    from stormo.checkpoint.tensors import Encoded


def main(arguments: Sequence[str]) -> int:
    """Read the weights, write them, and say what was written."""
    parser = Parser(
        prog="stormo export",
        description="Write the weights of a checkpoint, named as in model.state_dict(), into one safetensors file.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="RUN", help="name of a run, its folder, or one checkpoint")
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="file to write (default: RUN-step-….safetensors in this folder)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the checkpoint of the best epoch (default: the newest)")
    which.add_argument("--step", type=int, metavar="STEP", help="the checkpoint of this step")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    asked = parser.parse_intermixed_args(list(arguments))  # FILE may follow an option
    name, path = _find(asked.source, Path(asked.runs_folder), is_best=asked.best, step=asked.step)
    file = Path(asked.file or f"{name}-{path.name.partition('.')[0]}.safetensors")
    _require_free(file, may_replace=asked.force)

    from stormo.checkpoint import CorruptCheckpointError, Reader, newest_good, weights_digest
    from stormo.checkpoint.reader import check_digest
    from stormo.checkpoint.tensors import Encoded

    try:
        with Reader(path) as reader:
            step = reader.manifest.step
            (model,) = reader.read_sections("model")
            check_digest(reader, model)
    except CorruptCheckpointError as error:
        good, _ = newest_good(path.parent)
        offer = f"the newest good checkpoint is that of step {good.step}: --step {good.step}" if good else ""
        raise CorruptCheckpointError(error.path, error.problem, offer) from error
    # By "format" other programs know that these are weights of torch.
    encoded = Encoded(model, {"format": "pt", "stormo_step": str(step)})
    _write(file, encoded)
    lines = [
        f"weights   {file}  ({format_bytes(encoded.size_bytes)}, {pluralize(len(model), 'tensor')}, step {step})",
        f"digest    {weights_digest(model)}",
    ]
    write_text("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def _require_free(file: Path, *, may_replace: bool) -> None:
    if file.is_dir() or (file.exists() and not file.is_file()):
        raise SettingError(f"{file} was to be written", "it is no ordinary file", "name another one")
    if file.exists() and not may_replace:
        raise SettingError(f"{file} was to be written", "it is there already", "name another file, or set --force")


def _write(file: Path, encoded: Encoded) -> None:
    """A reader sees the whole file or none, even after a power cut."""
    from stormo.checkpoint.writer import sync_folder, write_file

    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_file(temporary, encoded)
        temporary.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise SettingError(
            f"{file} was to be written", f"it cannot be ({error.strerror})", "make room, or name another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the first error was reported already
            temporary.unlink(missing_ok=True)
