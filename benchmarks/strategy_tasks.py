"""Small tasks on made-up data, for benchmarks that compare strategies: the two reference networks, and wide layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stormo.config.plan import Facts
from stormo.data.order import derive_seed
from stormo.data.tensors import TensorData
from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions
from stormo.tasks.language_model import VOCABULARY, LanguageModel, LanguageModelOptions, Size
from stormo.tasks.task import Task
from stormo.tasks.wide_resnet import WideResNet

NUM_CLASSES = 16  # so that 2, 4 or 8 workers can share a classifier


class Words(LanguageModel):
    """A GPT of any size on windows of random bytes."""

    def __init__(self, size: Size, num_windows: int) -> None:
        super().__init__(LanguageModelOptions(block=size.block))
        self.size = size
        self._num_samples = num_windows

    def facts(self) -> Facts:
        """Of the made-up data."""
        return _facts(self._num_samples)

    def train_data(self) -> TensorData:
        """Windows as bytes."""
        size = (self._num_samples, self.block + 1)
        return TensorData(torch.randint(0, VOCABULARY, size, generator=_generator("words"), dtype=torch.uint8))

    def validation_data(self) -> TensorData:
        """The same: nothing is learned from them."""
        return self.train_data()


class Images(FashionMnist):
    """A WideResNet of any width on random images, without dropout."""

    def __init__(self, width: float, num_images: int, num_classes: int = NUM_CLASSES) -> None:
        super().__init__(FashionMnistOptions(width=width, dropout=0.0))
        self._num_samples, self._num_classes = num_images, num_classes

    def facts(self) -> Facts:
        """Of the made-up data."""
        return _facts(self._num_samples)

    def model(self) -> nn.Module:
        """With as many classes as workers may share."""
        return WideResNet(self.options.width, dropout=0.0, num_classes=self._num_classes)

    def train_data(self) -> TensorData:
        """Images as bytes and labels."""
        generator, count = _generator("images"), self._num_samples
        images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        return TensorData(images, torch.randint(0, self._num_classes, (count,), generator=generator))

    def validation_data(self) -> TensorData:
        """The same: nothing is learned from them."""
        return self.train_data()


class Points(Task):
    """A task on made-up points, which it trains and validates on."""

    def __init__(self, num_points: int) -> None:
        super().__init__(None)
        self._num_samples = num_points

    def facts(self) -> Facts:
        """Of the made-up data."""
        return _facts(self._num_samples)

    def validation_data(self) -> Any:
        """The same: nothing is learned from them."""
        return self.train_data()


class Normed(Points):
    """Linear layers in pairs, for tensor parallelism, with a batch norm between the pairs."""

    def model(self) -> nn.Module:
        """Of 28 features, which 2, 4 or 7 workers can share."""
        # Without a bias before a norm: its gradient is zero but for rounding, which lamb would scale up.
        first, second = ([nn.Linear(wide, 28), nn.ReLU(), nn.Linear(28, 28, bias=False)] for wide in (4, 28))
        return nn.Sequential(*first, nn.BatchNorm1d(28), nn.ReLU(), *second, nn.BatchNorm1d(28), nn.Linear(28, 4))

    def train_data(self) -> TensorData:
        """Random points."""
        generator = _generator("points of a batch norm")
        labels = torch.randint(0, 4, (self._num_samples,), generator=generator)
        return TensorData(torch.randn(self._num_samples, 4, generator=generator), labels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        x, y = batch
        return nn.functional.cross_entropy(model(x.to(torch.get_default_dtype())), y)


class Wide(Task):
    """Four square layers: gradients that are large beside the arithmetic."""

    name = "wide"

    def __init__(self, width: int) -> None:
        super().__init__(None)
        self._width = width

    def model(self) -> nn.Module:
        """Four layers with ReLUs between them."""
        layers = [layer for _ in range(4) for layer in (nn.Linear(self._width, self._width), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def train_data(self) -> TensorData:
        """Random points, to be learnt by heart."""
        x = torch.randn(4096, self._width, generator=torch.Generator().manual_seed(0))
        return TensorData(x, x.roll(1, dims=1))

    def validation_data(self) -> TensorData:
        """The same."""
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


class Gan(Points):
    """A critic and a generator of points, each with its optimizer; the noise depends on the sample alone."""

    num_draws = 4

    def model(self) -> nn.Module:
        """Both networks."""
        return nn.ModuleDict({"critic": _layers(2, 1), "generator": _layers(4, 2)})

    def train_data(self) -> TensorData:
        """Points near a line."""
        x = torch.randn(self._num_samples, 1, generator=_generator("points"))
        return TensorData(torch.cat([x, 2 * x + 1], dim=1))

    def optimizers(self, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        """The critic learns faster."""
        options: dict[str, Any] = {"eps": 1e-6, "weight_decay": 0.01}
        return {
            "critic": torch.optim.AdamW(model.get_submodule("critic").parameters(), lr=2e-3, **options),
            "generator": torch.optim.AdamW(model.get_submodule("generator").parameters(), lr=1e-3, **options),
        }

    def augment(self, batch: Any, draws: Tensor) -> Any:
        """The points with their noise."""
        return *batch, draws * 2 - 1

    def loss(self, model: nn.Module, batch: Any, optimizer: str = "critic") -> Tensor:
        """Of the critic or of the generator."""
        points, noise = (tensor.to(torch.get_default_dtype()) for tensor in batch)
        critic, generator = model.get_submodule("critic"), model.get_submodule("generator")
        fake = critic(generator(noise))
        if optimizer == "generator":
            return nn.functional.softplus(-fake).mean()
        return (nn.functional.softplus(fake) + nn.functional.softplus(-critic(points))).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """How real the points look."""
        return {"score": model.get_submodule("critic")(batch[0].to(torch.get_default_dtype())).sum()}


def _layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, outputs))


def _facts(num_samples: int) -> Facts:
    return Facts(num_train=num_samples, num_validation=num_samples, train_bytes=num_samples, has_accuracy=False)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed("spread", name))


# 8 heads for as many workers along the axis tensor; 12 rows of positions, of which 8 workers get 2 each until none are
# left for the last two. The deep one has a piece for every worker of a pipeline of 8.
_GPT = Size(num_layers=3, width=32, num_heads=8, block=12)
_DEEP_GPT = Size(num_layers=6, width=32, num_heads=8, block=12)
_TASKS: Mapping[str, Callable[[int], Task]] = {
    "GPT": lambda num_samples: Words(_GPT, num_samples),
    "deep GPT": lambda num_samples: Words(_DEEP_GPT, num_samples),
    "WideResNet": lambda num_samples: Images(0.25, num_samples),
    # For 7 workers.
    "GPT of 7 heads": lambda num_samples: Words(Size(num_layers=3, width=28, num_heads=7, block=12), num_samples),
    "WideResNet of 14 classes": lambda num_samples: Images(0.25, num_samples, num_classes=14),
    "normed MLP": Normed,
    "GAN": Gan,
}


def make_task(name: str, num_samples: int) -> Task:
    """A task by the name that tables show."""
    return _TASKS[name](num_samples)
