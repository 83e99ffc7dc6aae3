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
from stormo.telemetry.runs_folder import find_run
from stormo.telemetry.text import format_bytes, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from stormo.checkpoint.format import Found
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
    name, path = find_checkpoint(asked.source, Path(asked.runs_folder), is_best=asked.best, step=asked.step)
    file = Path(asked.file or f"{name}-{path.name.partition('.')[0]}.safetensors")
    _require_free(file, may_replace=asked.force)

    from stormo.checkpoint import weights_digest
    from stormo.checkpoint.tensors import Encoded

    step, model = read_weights(path)
    # By "format" other programs know that these are weights of torch.
    encoded = Encoded(model, {"format": "pt", "stormo_step": str(step)})
    _write(file, encoded)
    lines = [
        f"weights   {file}  ({format_bytes(encoded.size_bytes)}, {pluralize(len(model), 'tensor')}, step {step})",
        f"digest    {weights_digest(model)}",
    ]
    write_text("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def read_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint and its verified weights, on the CPU."""
    from stormo.checkpoint import CorruptCheckpointError, Reader, newest_good
    from stormo.checkpoint.reader import check_digest

    try:
        with Reader(path) as reader:
            (model,) = reader.read_sections("model")
            check_digest(reader, model)
            return reader.manifest.step, model
    except CorruptCheckpointError as error:
        good, _ = newest_good(path.parent)
        offer = f"the newest good checkpoint is that of step {good.step}: --step {good.step}" if good else ""
        raise CorruptCheckpointError(error.path, error.problem, offer) from error


def find_checkpoint(source: str, runs_folder: Path, *, is_best: bool, step: int | None) -> tuple[str, Path]:
    """The checkpoint that was asked for, and a name for it."""
    from stormo.checkpoint import find

    path = Path(source)
    if (path / "manifest.json").is_file():
        if is_best or step is not None:
            option = "--best" if is_best else f"--step {step}"
            raise SettingError(
                f"{option} was set", f"{path} is one checkpoint", "leave it out, or name the run instead"
            )
        return _name_of(path.resolve().parent), path
    if find(path):  # a folder of checkpoints, such as a script's own
        name, folder = _name_of(path.resolve()), path
    else:
        run = find_run(runs_folder, source)
        name, folder = run.name, run.checkpoints
    found = find(folder)
    if not found:
        raise SettingError(f"run {name} was to be exported", "it has no checkpoint yet", "train it first")
    if step is None:
        return name, _best(name, found) if is_best else found[0].path
    for one in found:
        if one.step == step:
            return name, one.path
    steps = ", ".join(str(one.step) for one in reversed(found))
    raise SettingError(f"--step {step} was set", f"{name} has no such checkpoint", f"choose one of: {steps}")


def _name_of(folder: Path) -> str:
    """The run that a folder of checkpoints belongs to, or its own name."""
    return (folder.parent if folder.name == "checkpoints" else folder).name


def _best(name: str, found: Sequence[Found]) -> Path:
    from stormo.checkpoint import CorruptCheckpointError, read_manifest

    ranked = []
    for one in found:
        try:
            metric = read_manifest(one.path).metric
        except CorruptCheckpointError:
            continue  # it cannot be exported either
        if metric is not None:
            ranked.append((metric, one.step, one.path))
    if not ranked:
        raise SettingError(
            "--best was set", f"no checkpoint of {name} was saved with a validation", "leave it out, or set --step"
        )
    return max(ranked)[2]


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
