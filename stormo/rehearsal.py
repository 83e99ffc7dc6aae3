"""The first passes of a run, whose effect is thrown away: what a task does wrong shows here, in one sentence.

Every worker rehearses alike, before the run has a folder. Afterwards the weights, buffers, gradients and random
generators are what they were.
"""

from __future__ import annotations

import itertools
import pickle
import re
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from stormo.checkpoint import collect_random_state, restore_random_state
from stormo.data.batches import tensors_in
from stormo.data.loaders import Batch, Loader
from stormo.errors import SettingError
from stormo.metrics import Validation
from stormo.strategies.strategy import Strategy
from stormo.tasks.returned import without_gradient
from stormo.tasks.task import Task

_PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
_PICKLING = str(Path("multiprocessing", "reduction.py"))
_NOT_A_PLACE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_EXPLAINED = (RuntimeError, AttributeError, TypeError)
# What torch or Python say of a mistake; what was done, why it cannot be, what to write instead.
_MEANINGS = (
    (
        r"backward through the graph a second time",
        "calls backward() itself",
        "its gradient is taken, and weighed, once it is returned",
        "leave backward() and step() out of it",
    ),
    (
        r"on the same device|indices should be either on|Input type \(.*weight type",
        "mixes tensors",
        "the model and the batch are on {device}, and whatever meets them must be there too",
        "make it with device= of one of the batch's tensors, or in a module by register_buffer()",
    ),
    (
        r"same dtype|scalar type|Found dtype",
        "mixes tensors",
        "the numbers of the batch and the weights must be of one type",
        "let the data set give torch.float32 (.float()), and class numbers as torch.int64 (.long())",
    ),
    (
        r"'\w*Parallel' object (has no attribute|is not)",
        "does more with the model than to call it",
        "on several workers a wrapper stands for it, which exchanges gradients when it is called",
        "do that in the model's forward()",
    ),
)


def rehearse(strategy: Strategy, loader: Loader, validation: Validation, *, every_shape: bool) -> None:
    """Run the first training passes and the first validation batch, and leave no trace of them.

    Args:
        strategy: holds the task and the model.
        loader: of the run.
        validation: of the run.
        every_shape: also run the short last batch, and make ready whatever the first steps would stumble over.
    """
    task = strategy.task
    # torch's own words on what is explained below
    warnings.filterwarnings("ignore", "Got pickle error when attempting to start")
    random_state = collect_random_state()
    try:
        with explained(task, "train_data", "loss", strategy.world.device):
            batches = _checked(task, loader.first_and_last())
            strategy.warm_up(loader, batches if every_shape else itertools.islice(batches, 1), _FirstLook(strategy))
        with explained(task, "validation_data", "metrics", strategy.world.device):
            rounds = validation.run(strategy.module, strategy.autocast)
            next(rounds)
            cast("Generator[object]", rounds).close()
    finally:
        restore_random_state(*random_state)


class _FirstLook:
    """Sees, after the first pass, what no type can tell: parameters without a gradient, a loss that is no number."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._has_looked = False

    def __call__(self, loss: Tensor) -> None:
        if self._has_looked:
            return
        self._has_looked = True
        strategy = self._strategy
        names = without_gradient(strategy.module)
        if names and not strategy.task.find_unused:
            raise _unused(strategy.task, names)
        # All workers ask, whatever their own loss is, and the main one warns for all.
        if strategy.world.max(torch.tensor([float(not torch.isfinite(loss))])).item():
            strategy.notices.append(
                f"{type(strategy.task).__name__}.loss() is not a finite number in the very first batch: look for a "
                "division by zero, a log of zero, and inputs that are not scaled."
            )


def _unused(task: Task, names: list[str]) -> SettingError:
    name, more = type(task).__name__, len(names) - 3
    listed = ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
    are, them = ("parameters", "them") if len(names) > 1 else ("parameter", "it")
    return SettingError(
        f"{name}.model() has the {are} {listed}",
        f"{name}.loss() gave {them} no gradient in the first batch",
        f"use {them} in loss(), leave {them} out, call requires_grad_(False) on {them}, or set find_unused = True on "
        f"{name} if other batches use {them}",
    )


def _checked(task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if next(tensors_in(batch.data), None) is None:
            raise SettingError(
                f"{type(task).__name__}.train_data() gives batches of type {type(batch.data).__name__}",
                "there is no tensor in them",
                "return tensors or numbers from the data set",
            )
        yield batch


@contextmanager
def explained(task: Task, data_method: str, method: str, device: torch.device) -> Iterator[None]:
    """Put what torch and Python say of well-known mistakes into a sentence; all else goes up as it is."""
    name = type(task).__name__
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = next(iter(str(error).splitlines()), "").rstrip(".")
        if isinstance(error, _PICKLE_ERRORS) and any(frame.filename.endswith(_PICKLING) for frame in frames):
            raise SettingError(
                f"{name}.{data_method}() returned a data set that cannot be sent to a loading process ({text})",
                "loading processes get it by pickle",
                "set --loader-workers 0, or keep that out of it (functions and classes go to the top level of a file)",
            ) from error
        for pattern, what, why, instead in _MEANINGS if isinstance(error, _EXPLAINED) else ():
            if re.search(pattern, text):
                said = f"{name}.{method}() {what} ({_place(frames)}{text})"
                raise SettingError(said, why.format(device=device), instead) from error
        raise


def _place(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_A_PLACE)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""
