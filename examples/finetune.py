"""Fine-tuning: the ResNet of `resnet50.py`, with weights from a file, learns the clothes of Fashion-MNIST.

    stormo train examples/resnet50.py --run-name first
    stormo export first resnet.safetensors
    stormo train examples/finetune.py --init-from resnet.safetensors                             # all layers
    stormo train examples/finetune.py --init-from resnet.safetensors --freeze 'stem.*,blocks.*'  # the head alone

`--init-from` also takes a state dict of torch, or a run. It says which tensors it took: the head has another shape here
and starts fresh.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import resnet50
from torch.nn.functional import cross_entropy, interpolate

import stormo
from stormo.config import option
from stormo.data import TensorData
from stormo.data.fashion_mnist import find_or_fetch, read


class Finetune(stormo.Task):
    """Ten kinds of clothes, from a network that knows something else."""

    name = "finetune"
    lr_factors: ClassVar = {"head.*": 10.0}  # fresh weights learn faster than trained ones
    defaults: ClassVar = {"batch_size": 32, "base_lr": 0.01, "weight_decay": 1e-4, "epochs": 2}

    @dataclass(frozen=True, kw_only=True)
    class Options:
        size: Literal["tiny", "resnet50"] = option("tiny", "as in resnet50.py")
        num_images: int = option(2000, "images to train on, of 60,000")

    def fetch(self):
        find_or_fetch(None)

    def model(self):
        _, width, depths = resnet50.SIZES[self.options.size]
        return resnet50.ResNet(width, depths, num_classes=10)

    def train_data(self):
        images, labels = read(find_or_fetch(None), "train")
        return TensorData(images[: self.options.num_images], labels[: self.options.num_images])

    def validation_data(self):
        images, labels = read(find_or_fetch(None), "validation")
        return TensorData(images[:1000], labels[:1000])

    def _scores(self, model, images):
        """Grey images of 28 pixels, as the network knows images."""
        images = (images / 127.5 - 1).unsqueeze(1).expand(-1, 3, -1, -1)
        return model(interpolate(images, size=resnet50.SIZES[self.options.size][0], mode="bilinear"))

    def loss(self, model, batch):
        images, labels = batch
        return cross_entropy(self._scores(model, images), labels)

    def metrics(self, model, batch):
        images, labels = batch
        scores = self._scores(model, images)
        return {
            "loss": cross_entropy(scores, labels, reduction="sum"),
            "accuracy": (scores.argmax(dim=1) == labels).sum(),
        }
