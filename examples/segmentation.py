"""Segmentation: a small U-Net marks the pixels of discs and squares in noisy, made-up images.

stormo train examples/segmentation.py --num-gpus 2
stormo train examples/segmentation.py --task.pixels 256 --task.width 64 --task.num-images 20000 --epochs 50
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import stormo
from stormo.config import option

NUM_CLASSES = 3  # background, disc, square


def _convs(channels, out):
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(_convs(n, out) for n, out in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(_convs(3 * out, out) for out in widths[-2::-1])
        self.head = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, x):
        kept = []
        for level, convs in enumerate(self.down):
            x = convs(nn.functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for convs in self.up:
            x = convs(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return self.head(x)


class Shapes(Dataset):
    """Images [1, pixels, pixels], each drawn when it is read, and the class of every pixel."""

    def __init__(self, num_images, pixels, seed):
        self.num_images, self.pixels, self.seed = num_images, pixels, seed

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed + index)
        line = torch.linspace(0, 1, self.pixels)
        mask = torch.zeros(self.pixels, self.pixels, dtype=torch.int64)
        for kind in (1, 2):
            y, x, radius = (torch.rand(3, generator=random) * torch.tensor([0.8, 0.8, 0.15]) + 0.1).tolist()
            down, across = (line.view(-1, 1) - y).abs(), (line - x).abs()
            mask[(down.hypot(across) if kind == 1 else torch.maximum(down, across)) < radius] = kind
        noise = torch.randn(self.pixels, self.pixels, generator=random)
        return ((mask > 0) + 0.3 * noise).unsqueeze(0), mask


class Segmentation(stormo.Task):
    """The pixels of discs and squares."""

    name = "segmentation"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 3e-3, "batch_size": 16, "epochs": 5}

    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: int = option(8, "channels of the first level")
        pixels: int = option(32, "height and width of an image, a multiple of 4")
        num_images: int = option(512, "images of an epoch; validation has a quarter of that")

    def model(self):
        return UNet(self.options.width)

    def train_data(self):
        return Shapes(self.options.num_images, self.options.pixels, seed=0)

    def validation_data(self):
        return Shapes(self.options.num_images // 4, self.options.pixels, seed=10**9)

    def loss(self, model, batch):
        images, masks = batch
        return cross_entropy(model(images), masks)  # all images have as many pixels, so this is a mean over images

    def metrics(self, model, batch):
        images, masks = batch
        scores = model(images)
        found, there = scores.argmax(dim=1) > 0, masks > 0
        union = (found | there).sum()
        iou = (found & there).sum() / union.clamp(min=1)
        return {
            "loss": cross_entropy(scores, masks) * len(images),
            "iou": (iou, union),  # a mean over the union's pixels: stormo divides by those of all images
            "pixel_accuracy": (scores.argmax(dim=1) == masks).float().mean(dim=(1, 2)).sum(),
        }
