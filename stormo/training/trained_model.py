"""The model of a checkpoint in one process, whatever mesh has saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from stormo.checkpoint import Reader
from stormo.checkpoint.format import CorruptCheckpointError
from stormo.checkpoint.reader import ReadItem, check_digest, newest_good
from stormo.checkpoint.state import ModelMismatchError
from stormo.parallel.weight_average import EMA
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task

_AS_TRAINED = "leave out --task options that change the model, or take the task as it was trained"


def read_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint, and its weights and buffers, verified; the error names a good checkpoint beside it.

    Of a run with --ema they are the moving averages.
    """
    try:
        with Reader(path) as reader:
            (weights,) = reader.read_sections("model")
            check_digest(reader, weights)
            return reader.manifest.step, weights | _averages(reader, weights)
    except CorruptCheckpointError as error:
        good, _ = newest_good(path.parent)
        offer = f"the newest good checkpoint is that of step {good.step}: {good.path}" if good else ""
        raise CorruptCheckpointError(error.path, error.problem, offer) from error


def _averages(reader: Reader, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moving averages of weights and buffers, under all names of each; nothing in a run without."""
    stored, entries = reader.entries("optimizer"), reader.entries("model")
    names = {name: (name if name + EMA in stored else entries[name].stored_as) + EMA for name in weights}
    found = {stored_as: torch.empty_like(weights[name]) for name, stored_as in names.items() if stored_as in stored}
    reader.fill(
        ReadItem(section="optimizer", name=name, offset=(0,) * into.ndim, into=into) for name, into in found.items()
    )
    return {name: found[stored_as] for name, stored_as in names.items() if stored_as in found}


def make_trained(task: Task, weights: Mapping[str, Tensor], path: str, precision: str) -> nn.Module:
    """The task's model with these weights, on the CPU and in evaluation mode."""
    model = check_model(task, task.model())
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise ModelMismatchError(f"The checkpoint {path} has no {name}, which the model has; {_AS_TRAINED}.")
        if name not in own:
            raise ModelMismatchError(f"The checkpoint {path} has {name}, which the model lacks; {_AS_TRAINED}.")
        here, there = tuple(own[name].shape), tuple(weights[name].shape)
        if here != there:
            raise ModelMismatchError(
                f"{name} of the checkpoint {path} has the shape {there}, that of the model {here}; {_AS_TRAINED}."
            )
    if precision == "fp64":
        model = model.double()
    model.load_state_dict(weights)
    return model.eval()
