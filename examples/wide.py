"""A residual network that defines how it is split, for `--strategy tensor`, `hybrid` and `pipeline`."""

from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import TensorDataset

import stormo

NUM_INPUTS, NUM_CLASSES = 16, 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width, num_blocks):
        super().__init__()
        self.first = nn.Linear(NUM_INPUTS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, NUM_CLASSES))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return classify(self.norm, self.head, x)


def classify(norm, head, x):
    return head(norm(x))


class Wide(stormo.Task):
    """Made-up points around four centres."""

    name = "wide"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 0.003, "lr_rule": "sqrt", "epochs": 2, "warmup_epochs": 0.5}

    def model(self):
        return Net(width=32, num_blocks=4)

    def tensor_plan(self, model):
        """What the axis tensor splits: a block's first layer by its outputs, the second by its inputs."""
        return {"blocks.*.up": "column", "blocks.*.down": "row", "head.0": "column", "head.2": "row"}

    def classifier(self, model):
        """What hybrid splits; every worker has a replica of the rest."""
        return model.head

    def pieces(self, model):
        """The pieces of a pipeline's stages: each takes the output of the one before."""
        return [model.first, *model.blocks, partial(classify, model.norm, model.head)]

    def train_data(self):
        return _points(2000, seed=0)

    def validation_data(self):
        return _points(500, seed=1)

    def loss(self, model, batch):
        points, classes = batch
        return cross_entropy(model(points), classes)

    def metrics(self, model, batch):
        points, classes = batch
        scores = model(points)
        return {
            "loss": cross_entropy(scores, classes, reduction="sum"),
            "accuracy": (scores.argmax(dim=1) == classes).sum(),
        }


def _points(count, seed):
    centres = torch.randn(NUM_CLASSES, NUM_INPUTS, generator=torch.Generator().manual_seed(42))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (count,), generator=generator)
    return TensorDataset(centres[classes] + torch.randn(count, NUM_INPUTS, generator=generator), classes)
