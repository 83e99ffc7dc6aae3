"""The contract of a task: what a user brings to be trained. Nothing in it knows of distribution.

This file imports no torch, so that the options of a built-in task can be read in a blink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stormo.errors import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from stormo.plan import Facts


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a task that has none."""


class Task:
    """Subclass it and write `model`, `train_data`, `validation_data` and `loss`; the rest is optional."""

    name: ClassVar[str] = "task"
    Options: ClassVar[type[Any]] = NoOptions
    num_draws: ClassVar[int] = 0  # random numbers that `augment` wants for each sample

    def __init__(self, options: Any) -> None:
        self.options = options
        self._datasets: tuple[Dataset[Any], Dataset[Any]] | None = None

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the validation set, loaded once."""
        if self._datasets is None:
            self._datasets = self.train_data(), self.validation_data()
        return self._datasets

    @classmethod
    def needs_data_for_facts(cls) -> bool:
        """Whether the facts are found by loading the data."""
        return cls.facts is Task.facts

    def facts(self) -> Facts:
        """Sizes that the plan needs; override it where they are known without loading the data."""
        from stormo.plan import Facts

        train, validation = self.datasets()
        return Facts(
            num_train=len(train),  # type: ignore[arg-type]
            num_validation=len(validation),  # type: ignore[arg-type]
            train_bytes=getattr(train, "num_bytes", None),
        )

    def fetch(self) -> Path | None:
        """Bring the data to this node; runs in one process of each node, before `train_data` anywhere."""
        return None

    def model(self) -> nn.Module:
        """The model, freshly initialised from torch's global generator."""
        raise NotImplementedError(f"{type(self).__name__}.model() is missing: return the nn.Module to train")

    def train_data(self) -> Dataset[Any]:
        """The training set: `stormo.data.TensorData`, or any map-style data set."""
        raise NotImplementedError(f"{type(self).__name__}.train_data() is missing: return the training data set")

    def validation_data(self) -> Dataset[Any]:
        """The validation set, in the same form."""
        raise NotImplementedError(f"{type(self).__name__}.validation_data() is missing: return the validation data set")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the samples of a batch, a scalar."""
        raise NotImplementedError(f"{type(self).__name__}.loss() is missing: return the mean loss of a batch")

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Sums over the samples of a batch, by name; their share of all samples is what is reported."""
        num_samples = batch_length(batch)
        return {"loss": self.loss(model, batch) * num_samples}

    def augment(self, batch: Any, draws: Tensor) -> Any:
        """Change a training batch at random, on its device.

        Args:
            batch: as the data set gives it, already on the device.
            draws: numbers in [0, 1), `num_draws` for each sample; they depend on seed, epoch and the sample's
                place in the global order alone, so the result does not depend on the number of workers.
        """
        return batch


def batch_length(batch: Any) -> int:
    """How many samples a batch of nested tuples, lists and dicts of tensors holds."""
    first = _first_tensor(batch)
    if first is None:
        raise SettingError(
            f"a batch of type {type(batch).__name__} was given", "it holds no tensor to count", "override metrics()"
        )
    return int(first.shape[0])


def _first_tensor(batch: Any) -> Any:
    if hasattr(batch, "shape"):
        return batch
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return None
    return next((found for part in batch if (found := _first_tensor(part)) is not None), None)
