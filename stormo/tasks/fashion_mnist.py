"""The reference job: a WideResNet on Fashion-MNIST (Xiao et al., arXiv 1708.07747)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stormo.config.plan import Facts
from stormo.config.schema import option
from stormo.errors import SettingError
from stormo.tasks.task import Task
from stormo.telemetry.text import tell

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stormo.data.tensors import TensorData

_SIZES = {"train": 60_000, "validation": 10_000}
_MOST_WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class FashionMnistOptions:
    """Options of fashion-mnist."""

    width: float = option(
        10.0, "width of the network: 10 is the documents' (17.1 M parameters), 1 a tenth of its channels"
    )
    dropout: float = option(0.01, "dropout between the two convolutions of a block")
    augment: bool = option(False, "flip and shift the training images at random")
    label_smoothing: float = option(0.0, "label smoothing of the training loss")
    data_folder: str | None = option(None, "folder with the data set's files; default: found or fetched")
    train_samples: int | None = option(None, "train on the first so many images; default all 60000")
    validation_samples: int | None = option(None, "validate on the first so many images; default all 10000")


class FashionMnist(Task):
    """60,000 training and 10,000 validation images, 28×28, 10 classes, pixels in [0, 1]."""

    name = "fashion-mnist"
    Options: ClassVar[type[Any]] = FashionMnistOptions
    defaults: ClassVar[Mapping[str, Any]] = {"target_accuracy": 0.85}
    num_draws = 3  # flip, vertical shift, horizontal shift

    def __init__(self, options: FashionMnistOptions) -> None:
        super().__init__(options)
        _check(options)
        self._folder: Path | None = None

    def facts(self) -> Facts:
        """Known without the data."""
        num_train = self.options.train_samples or _SIZES["train"]
        return Facts(
            num_train=num_train,
            num_validation=self.options.validation_samples or _SIZES["validation"],
            flops_per_sample=training_flops(self.options.width),
            compile_saves=0.0,  # measured: NormAct and MaxPool2x2 beat what the compiler makes of this network
            train_bytes=num_train * (28 * 28 + 8),
            unit="images",
            has_accuracy=True,
            has_convolutions=True,
            has_batch_norms=True,
        )

    def fetch(self) -> Path:
        """Find or fetch the files, and verify them."""
        from stormo.data.fashion_mnist import find_or_fetch

        folder = self.options.data_folder
        self._folder = find_or_fetch(Path(folder) if folder else None, tell=tell)
        return self._folder

    def model(self) -> nn.Module:
        """A WideResNet."""
        from stormo.tasks.wide_resnet import WideResNet

        return WideResNet(self.options.width, self.options.dropout)

    def pieces(self, model: nn.Module) -> Sequence[Any] | None:
        """The first convolution, every block, and the head."""
        from torch.nn import Sequential

        from stormo.tasks.wide_resnet import WideResNet, score

        if not isinstance(model, WideResNet):
            return None  # a subclass has another model
        return [Sequential(model.stem, model.stem_norm), *model.blocks, partial(score, model.head)]

    def train_data(self) -> TensorData:
        """Images as bytes and labels, in memory."""
        return self._data("train", self.options.train_samples)

    def validation_data(self) -> TensorData:
        """The same for validation."""
        return self._data("validation", self.options.validation_samples)

    def _data(self, split: str, num_samples: int | None) -> TensorData:
        from stormo.data.fashion_mnist import read
        from stormo.data.tensors import TensorData

        images, labels = read(self._folder or self.fetch(), split)  # type: ignore[arg-type]
        return TensorData(images[:num_samples], labels[:num_samples])

    def augment(self, batch: Any, draws: Tensor) -> Any:
        """Mirror half of the images and shift each by up to two pixels."""
        if not self.options.augment:
            return batch
        from stormo.data.tensors import flip_and_shift

        images, labels = batch
        return flip_and_shift(images, draws, max_shift=2), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy."""
        from torch.nn.functional import cross_entropy

        images, labels = batch
        return cross_entropy(
            _at_least_fp32(model(_scaled(images))), labels, label_smoothing=self.options.label_smoothing
        )

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Sums of cross-entropy and of right answers."""
        from torch.nn.functional import cross_entropy

        images, labels = batch
        logits = model(_scaled(images))
        return {
            "loss": cross_entropy(_at_least_fp32(logits), labels, reduction="sum"),
            "accuracy": (logits.argmax(dim=1) == labels).sum(),
        }


def training_flops(width: float) -> float:
    """Floating-point operations of forward and backward for one image: twice forward, again twice for backward."""
    macs = 28 * 28 * 9 * 1 * 16
    channels = 16
    for side, out in ((28, round(16 * width)), (14, round(32 * width)), (7, round(64 * width))):
        pixels = side * side
        macs += pixels * (9 * channels * out + 3 * 9 * out * out)
        macs += pixels * channels * out if channels != out else 0
        channels = out
    return 3 * 2.0 * (macs + channels * 10)


def _at_least_fp32(logits: Tensor) -> Tensor:
    # A softmax in 16 bits loses digits; float64 must stay what it is.
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _scaled(images: Tensor) -> Tensor:
    """Bytes [n, 28, 28] to numbers in [0, 1], [n, 1, 28, 28], in torch's default type (fp32, or fp64 when exact)."""
    import torch

    return images.unsqueeze(1).to(torch.get_default_dtype()).div_(255)


def _check(options: FashionMnistOptions) -> None:
    if options.width < 1 / 16:
        raise SettingError(
            f"--task.width {options.width:g} was set",
            f"16 × {options.width:g} channels are less than one",
            "set --task.width 10, or something from 0.0625 up",
        )
    if options.width > _MOST_WIDTH:
        raise SettingError(
            f"--task.width {options.width:g} was set",
            f"weights grow with its square, and {_MOST_WIDTH} are 17.1 M × ({_MOST_WIDTH} / 10)² = 171 G of them",
            f"set --task.width 10, or something up to {_MOST_WIDTH}",
        )
    for flag, value in (("dropout", options.dropout), ("label-smoothing", options.label_smoothing)):
        if not 0 <= value < 1:
            raise SettingError(f"--task.{flag} {value:g} was set", "it must lie in [0, 1)", f"set --task.{flag} 0.01")
    for split, count in (("train", options.train_samples), ("validation", options.validation_samples)):
        if count is not None and not 1 <= count <= _SIZES[split]:
            raise SettingError(
                f"--task.{split}-samples {count} was set", f"there are {_SIZES[split]}", "set a number from 1 to that"
            )
