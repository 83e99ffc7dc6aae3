"""The model of a checkpoint in one process, whatever mesh has saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from stormo.checkpoint import Reader
from stormo.checkpoint.format import CorruptCheckpointError
from stormo.checkpoint.reader import check_digest, newest_good
from stormo.checkpoint.state import ModelMismatchError
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task


def read_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint, and its weights and buffers, verified; the error names a good checkpoint beside it."""
    try:
        with Reader(path) as reader:
            (weights,) = reader.read_sections("model")
            check_digest(reader, weights)
            return reader.manifest.step, weights
    except CorruptCheckpointError as error:
        good, _ = newest_good(path.parent)
        offer = f"the newest good checkpoint is that of step {good.step}: {good.path}" if good else ""
        raise CorruptCheckpointError(error.path, error.problem, offer) from error


def make_trained(task: Task, weights: Mapping[str, Tensor], path: str, precision: str) -> nn.Module:
    """The task's model with these weights, on the CPU and in evaluation mode."""
    model = check_model(task, task.model())
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise ModelMismatchError(f"The checkpoint {path} has no {name}, which the model has.")
        if name not in own:
            raise ModelMismatchError(f"The checkpoint {path} has {name}, which the model lacks.")
        here, there = tuple(own[name].shape), tuple(weights[name].shape)
        if here != there:
            raise ModelMismatchError(
                f"{name} of the checkpoint {path} has the shape {there}, that of the model {here}."
            )
    if precision == "fp64":
        model = model.double()
    model.load_state_dict(weights)
    return model.eval()
