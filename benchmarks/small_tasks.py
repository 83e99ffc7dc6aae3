"""Two tasks for the benchmarks that need many steps in little time: a small network on Fashion-MNIST, and one that
writes down what was really trained on, by itself and independently of stormo's own books."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stormo.config import option
from stormo.config.plan import Facts
from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.data.tensors import TensorData

WITNESS_FOLDER = "STORMO_WITNESS_FOLDER"  # where the witness writes: one folder for each attempt at a run


@dataclass(frozen=True, kw_only=True)
class SmallOptions(FashionMnistOptions):
    """Options of the small network."""

    width: int = option(1, "width of the network: 8 and 16 channels at 1")
    norm: bool = option(True, "batch norm after each convolution")


class Small(FashionMnist):
    """Fashion-MNIST with two strided convolutions and a linear layer."""

    name = "small"
    Options: ClassVar[type[Any]] = SmallOptions

    def facts(self) -> Facts:
        """Those of the data; the work of a sample is not that of the WideResNet."""
        return replace(super().facts(), flops_per_sample=None)

    def model(self) -> nn.Module:
        """Convolution, batch norm, ReLU and dropout, twice, then a linear layer."""
        from torch import nn

        options = self.options
        layers: list[nn.Module] = []
        in_channels = 1
        for num_channels in (8 * options.width, 16 * options.width):
            layers.append(nn.Conv2d(in_channels, num_channels, kernel_size=3, stride=2, padding=1))
            if options.norm:
                layers.append(nn.BatchNorm2d(num_channels))
            layers += [nn.ReLU(), nn.Dropout(options.dropout)]
            in_channels = num_channels
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(in_channels * 7 * 7, 10))


class Witness(Small):
    """The small task; after every optimizer step it appends which samples the step was made of.

    A line counts what entered the gradients that the optimizer applied: micro-batches whose gradients were cleared
    before a step leave no trace. The digests of the parameters before and after tell which step follows which.
    """

    name = "witness"

    def __init__(self, options: SmallOptions) -> None:
        super().__init__(options)
        self._pending: list[int] = []
        self._before = ""
        self._net: nn.Module | None = None
        self._file: int | None = None

    def facts(self) -> Facts:
        """With eight bytes more for each sample: its number."""
        facts = super().facts()
        assert facts.train_bytes is not None
        return replace(facts, train_bytes=facts.train_bytes + 8 * facts.num_train)

    def train_data(self) -> TensorData:
        """Images, labels, and the number of each sample."""
        import torch

        from stormo.data.tensors import TensorData

        data = super().train_data()
        return TensorData(*data.tensors, torch.arange(len(data)))

    def model(self) -> nn.Module:
        """The small network, whose optimizer is watched."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._net = super().model()
        self.watch = register_optimizer_step_post_hook(self._after_step)
        return self._net

    def augment(self, batch: Any, draws: Tensor) -> Any:
        """As the small task does; the numbers stay."""
        images, labels, samples = batch
        return *super().augment((images, labels), draws), samples

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy; the samples are remembered until the optimizer steps."""
        images, labels, samples = batch
        assert self._net is not None
        if next(self._net.parameters()).grad is None:  # earlier gradients were applied or discarded
            self._pending = []
            self._before = parameter_digest(self._net)
        self._pending += samples.tolist()
        return super().loss(model, (images, labels))

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Sums of cross-entropy and of right answers."""
        self._write({"event": "validation"})
        return super().metrics(model, batch)

    def _after_step(self, *_: Any) -> None:
        assert self._net is not None
        self._write(
            {
                "event": "step",
                "world_size": int(os.environ.get("WORLD_SIZE", "1")),
                "before": self._before,
                "after": parameter_digest(self._net),
                "samples": self._pending,
            }
        )
        self._pending = []

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            path = Path(os.environ[WITNESS_FOLDER]) / f"rank-{os.environ.get('RANK', '0')}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # One call hands the whole line to the kernel, so that a kill cannot take it back.
        os.write(self._file, json.dumps(event).encode() + b"\n")


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 over the bits of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
