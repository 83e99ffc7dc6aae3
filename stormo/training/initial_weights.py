"""Weights to start from: `--init-from`, of a file or of another run. Nothing in a file is ever run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from stormo.checkpoint.format import MANIFEST
from stormo.checkpoint.reader import find
from stormo.errors import SettingError, pluralize
from stormo.training.trained_model import read_weights

_INNER = ("state_dict", "model", "model_state_dict")  # where training scripts put the weights among other things
_PREFIXES = ("module.", "_orig_mod.")  # of DDP and torch.compile
_MAX_NAMED = 3


def read_initial(source: str, runs_folder: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a state dict, or of the newest checkpoint of a run."""
    said, path = f"--init-from {source} was set", Path(source)
    for folder in (path, Path(runs_folder) / path):
        if (folder / MANIFEST).is_file():
            return read_weights(folder)[1]
        if found := find(folder) or find(folder / "checkpoints"):
            return read_weights(found[0].path)[1]
    if not path.is_file():
        what = "it has no checkpoint" if path.is_dir() else "there is no such file or run"
        raise SettingError(said, what, "name a safetensors file, a state dict of torch, or the folder of a run")
    try:
        is_safe = path.suffix == ".safetensors"
        content: Any = safetensors.torch.load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SettingError(
            said, f"it cannot be read ({why})", "save tensors alone: torch.save(model.state_dict(), FILE)"
        ) from error
    return _tensors(said, content)


def _tensors(said: str, found: Any) -> dict[str, Tensor]:
    """The state dict in what a file holds, with the names that the model itself gave."""
    for key in _INNER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    tensors = {n: t for n, t in found.items() if isinstance(t, Tensor)} if isinstance(found, Mapping) else {}
    if not tensors:
        raise SettingError(said, "it holds no tensors by name", "save it with torch.save(model.state_dict(), FILE)")
    for prefix in _PREFIXES:
        if all(str(name).startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def load_initial(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> str:
    """Give the model every tensor that it has by this name in this shape; say what was taken and what was not."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    shared = [name for name in own if name in weights]
    taken = [name for name in shared if own[name].shape == weights[name].shape]
    if not taken:
        raise SettingError(
            f"--init-from {source} was set",
            f"none of its {pluralize(len(weights), 'tensor')} ({_listed(list(weights))}) fits the model "
            f"({_listed(list(own))})",
            "name the weights of such a model, or leave it out",
        )
    model.load_state_dict({name: weights[name] for name in taken}, strict=False)
    others = {
        "not in it": [name for name in own if name not in weights],
        "of another shape": [name for name in shared if name not in set(taken)],
        "left over": [name for name in weights if name not in own],
    }
    text = f"--init-from {source}: {len(taken)} of the model's {pluralize(len(own), 'tensor')} were taken"
    return text + "".join(f"; {len(some)} {what} ({_listed(some)})" for what, some in others.items() if some) + "."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
