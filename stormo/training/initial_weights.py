"""Weights to start from: `--init-from`, of a file or of another run. Nothing in a file is ever run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from stormo.checkpoint.format import MANIFEST
from stormo.checkpoint.reader import find
from stormo.errors import SettingError, first_names, pluralize
from stormo.training.initial_file import HINT, check_initial, initial_folders
from stormo.training.trained_model import read_weights

_INNER = ("state_dict", "model", "model_state_dict")  # where training scripts put the weights among other things
_PREFIXES = ("module.", "_orig_mod.")  # of DDP and torch.compile
_SAVE = "save it with torch.save(model.state_dict(), FILE)"


def read_initial(source: str, runs_folder: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a state dict, or of the newest checkpoint of a run."""
    check_initial(source, runs_folder)
    for folder in initial_folders(source, runs_folder):
        if (folder / MANIFEST).is_file():
            return read_weights(folder)[1]
        if found := find(folder) or find(folder / "checkpoints"):
            return read_weights(found[0].path)[1]
    said, path = f"--init-from {source} was set", Path(source)
    if not path.is_file():  # a run whose checkpoints were never finished
        raise SettingError(said, "it has no checkpoint", HINT)
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise SettingError(said, f"it cannot be read ({error})", HINT) from error
    return _tensors(said, _torch_load(said, path))


def _torch_load(said: str, path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on kinds of files that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle end in an error of any kind
        # Not torch's own text, which advises to run what is in the file.
        why = "it is no file of torch with tensors and plain values alone"
        why = str(error.strerror) if isinstance(error, OSError) else why
        raise SettingError(said, f"it cannot be read: {why}", _SAVE) from error


def _tensors(said: str, found: Any) -> dict[str, Tensor]:
    """The state dict in what a file holds, with the names that the model itself gave."""
    for key in _INNER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    pairs = found.items() if isinstance(found, Mapping) else ()
    tensors = {n: t for n, t in pairs if isinstance(n, str) and isinstance(t, Tensor) and t.layout == torch.strided}
    if not tensors:
        raise SettingError(said, "it holds no dense tensors by name", _SAVE)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def load_initial(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> str:
    """Give the model every tensor that it has by this name in this shape; say what was taken and what was not."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    shared = [name for name in own if name in weights]
    taken = [name for name in shared if _fits(weights[name], own[name])]
    if not taken:
        raise SettingError(
            f"--init-from {source} was set",
            f"it holds {pluralize(len(weights), 'tensor')} ({first_names(list(weights))}), of which none fits the "
            f"model ({first_names(list(own))})",
            "name the weights of such a model, or leave it out",
        )
    model.load_state_dict({name: weights[name] for name in taken}, strict=False)
    others = {
        "not in it": [name for name in own if name not in weights],
        "of another shape or type": [name for name in shared if name not in set(taken)],
        "left over": [name for name in weights if name not in own],
    }
    text = f"--init-from {source}: {len(taken)} of the model's {pluralize(len(own), 'tensor')} were taken"
    return text + "".join(f"; {len(some)} {what} ({first_names(some)})" for what, some in others.items() if some) + "."


def _fits(given: Tensor, own: Tensor) -> bool:
    kinds = [(tensor.shape, tensor.is_floating_point(), tensor.is_complex()) for tensor in (given, own)]
    return kinds[0] == kinds[1]
