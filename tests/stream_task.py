"""A task of nested batches over streams, with a metric that keeps a state and an optimizer of its own.

It is named as a file by runs of the real command and imported by other tests. `STREAM_STOP="rank calls"` sends the
job SIGTERM in that call of `loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from stormo.config import option
from stormo.data.order import epoch_order
from stormo.tasks.task import Task

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of the stream task."""

    num_train: int = option(203, "training samples")
    num_validation: int = option(101, "validation samples")
    says_length: bool = option(True, "the stream has a length")
    is_map: bool = option(False, "the same samples, found by their index")
    own_optimizer: bool = option(False, "an optimizer of its own")


def sample(index: int) -> Sample:
    """Sample number `index`, with randomness of its own and a part whose length varies."""
    x = torch.randn(8, generator=torch.Generator().manual_seed(index))
    label = int(x[0] > 0) + int(x[1] > 0.5)
    words = list(range(1 + index % 3))
    return {"points": {"x": x + 0.01 * torch.randn(8), "index": index}, "label": label, "words": words}


class ByIndex(Dataset[Sample]):
    """The samples by their index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class InOrder(IterableDataset[Sample]):
    """The samples one after the other, in an order that differs from pass to pass."""

    def __init__(self, num_samples: int, *, shuffled: bool) -> None:
        self.num_samples = num_samples
        self.shuffled = shuffled
        self.number = 0

    def set_epoch(self, number: int) -> None:
        """Take the order of that pass: the very one that samples by their index would have."""
        self.number = number

    def __iter__(self) -> Iterator[Sample]:
        order = epoch_order(self.num_samples, 0, self.number + 1) if self.shuffled else range(self.num_samples)
        return (sample(int(index)) for index in order)


class Measured(InOrder):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.num_samples


class Streamed(Task):
    """Three classes of points."""

    name = "streamed"
    Options: ClassVar[type[Any]] = StreamOptions

    def __init__(self, options: StreamOptions | None = None) -> None:
        super().__init__(options or StreamOptions())
        self.f1 = MulticlassF1Score(3, average="macro")
        self.auroc = MulticlassAUROC(3, thresholds=None)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def _data(self, num_samples: int, *, shuffled: bool) -> Any:
        if self.options.is_map:
            return ByIndex(num_samples)
        return (Measured if self.options.says_length else InOrder)(num_samples, shuffled=shuffled)

    def train_data(self) -> Any:
        return self._data(self.options.num_train, shuffled=True)

    def validation_data(self) -> Any:
        return self._data(self.options.num_validation, shuffled=False)

    def collate(self, samples: list[Sample]) -> Any:
        most = max(len(one["words"]) for one in samples)
        rows = [one["words"] + [0] * (most - len(one["words"])) for one in samples]
        plain = [{key: value for key, value in one.items() if key != "words"} for one in samples]
        return super().collate(plain) | {"words": torch.tensor(rows)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        if not self.options.own_optimizer:
            return None
        first, last = model.get_submodule("0"), model.get_submodule("2")
        groups = [{"params": first.parameters(), "lr": 0.004}, {"params": last.parameters(), "lr": 0.001}]
        return torch.optim.Adam(groups)

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        scale = 1 + 0.01 * batch["words"].sum(dim=1, keepdim=True)
        logits: Tensor = model(batch["points"]["x"].to(torch.get_default_dtype()) * scale)
        return logits

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(self._logits(model, batch), batch["label"])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        logits, labels = self._logits(model, batch), batch["label"]
        self.f1.update(logits, labels)
        self.auroc.update(logits.softmax(dim=1), labels)
        return {
            "loss": cross_entropy(logits, labels, reduction="sum"),
            "accuracy": int((logits.argmax(dim=1) == labels).sum()),
            "f1": self.f1,
            "auroc": self.auroc,
        }
