"""A GAN on Fashion-MNIST: a critic and a generator, each with its optimizer and its loss, which step in turn.

stormo train examples/gan.py --num-gpus 2 --run-name gan     # a minute on a laptop, on 2,000 images
stormo train examples/gan.py --task.num-images 60000 --task.width 64 --batch-size 128 --epochs 50 --ema 0.999
python examples/gan.py gan                                   # draws clothes of a run into gan.png
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import stormo
from stormo.config import option
from stormo.data.fashion_mnist import find_or_fetch, read

NUM_NOISE = 64


class Clothes(Dataset):
    """Images in [-1, 1], each with the noise that a generated one is made of."""

    def __init__(self, split, num_images):
        self.images = read(find_or_fetch(None), split)[0][:num_images]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        # Drawn here, the noise depends on the seed, the epoch and the sample, not on the number of workers.
        return self.images[index].unsqueeze(0).float() / 127.5 - 1, torch.randn(NUM_NOISE)


def _generator(width):
    return nn.Sequential(
        nn.Linear(NUM_NOISE, 2 * width * 7 * 7),
        nn.Unflatten(1, (2 * width, 7, 7)),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def _critic(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 7 * 7, 1),
    )


class Gan(stormo.Task):
    """Clothes that nobody has sewn."""

    name = "gan"
    defaults: ClassVar = {"batch_size": 32, "epochs": 3}

    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: int = option(16, "channels of the networks")
        num_images: int = option(2000, "images to train on, of 60,000")

    def fetch(self):
        find_or_fetch(None)

    def model(self):
        return nn.ModuleDict({"critic": _critic(self.options.width), "generator": _generator(self.options.width)})

    def optimizers(self, model):
        """In the order in which they step; `loss` is called for each."""
        return {
            name: torch.optim.Adam(model[name].parameters(), lr=2e-4, betas=(0.5, 0.999))
            for name in ("critic", "generator")
        }

    def train_data(self):
        return Clothes("train", self.options.num_images)

    def validation_data(self):
        return Clothes("validation", self.options.num_images // 4)

    def loss(self, model, batch, optimizer):
        images, noise = batch
        made = model["critic"](model["generator"](noise))
        if optimizer == "generator":
            return softplus(-made).mean()
        return softplus(made).mean() + softplus(-model["critic"](images)).mean()

    def metrics(self, model, batch):
        """How often the critic is right: one half means that it cannot tell."""
        images, noise = batch
        real, made = model["critic"](images), model["critic"](model["generator"](noise))
        return {
            "loss": softplus(made).sum() + softplus(-real).sum(),
            "real_found": (real > 0).sum(),
            "made_found": (made < 0).sum(),
        }


if __name__ == "__main__":
    from PIL import Image

    model = stormo.open_run(sys.argv[1]).load_model()
    with torch.no_grad():
        made = model["generator"](torch.randn(8 * 8, NUM_NOISE))
    sheet = made.view(8, 8, 28, 28).transpose(1, 2).reshape(8 * 28, 8 * 28)
    Image.fromarray(((sheet + 1) * 127.5).byte().numpy()).save("gan.png")
