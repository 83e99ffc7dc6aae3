"""ResNet-50 on a folder of images, `train/CLASS/*.png` and `val/CLASS/*.png`, as ImageNet is laid out (needs Pillow).

    stormo train examples/resnet50.py                                                  # small and made up: seconds
    stormo train examples/resnet50.py --task.size resnet50 --task.data-folder /data/imagenet --precision bf16 \
        --batch-size 256 --epochs 90 --warmup-epochs 5 --decay cosine --num-gpus 8
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import stormo
from stormo.config import option

SIZES = {"tiny": (32, 8, (1, 1, 1, 1)), "resnet50": (224, 64, (3, 4, 6, 3))}  # pixels, channels, blocks of each stage


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        inner = [*_norm_conv(channels, width, 1), nn.ReLU(), *_norm_conv(width, width, 3, stride), nn.ReLU()]
        self.layers = nn.Sequential(*inner, *_norm_conv(width, 4 * width, 1))
        is_same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_norm_conv(channels, 4 * width, 1, stride))

    def forward(self, x):
        return torch.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width, depths, num_classes):
        super().__init__()
        self.stem = nn.Sequential(*_norm_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def _norm_conv(channels, out, kernel, stride=1):
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


class ImageFolder(torch.utils.data.Dataset):
    def __init__(self, folder, pixels, augment):
        self.pixels, self.augment = pixels, augment
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(path, n) for n, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        share, across, down, flip = torch.rand(4).tolist() if self.augment else (1.0, 0.5, 0.5, 1.0)
        side = round(min(image.size) * (0.35 + 0.65 * share))
        left, top = round(across * (image.width - side)), round(down * (image.height - side))
        image = image.resize((self.pixels, self.pixels), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
        return (pixels.flip(2) if flip < 0.5 else pixels), label


class ResNet50(stormo.Task):
    """Classes of images."""

    name = "resnet50"
    defaults: ClassVar = {"batch_size": 16, "weight_decay": 1e-4, "epochs": 5, "warmup_epochs": 1}
    defaults |= {"base_lr": 0.1 / 16, "base_batch_size": 16}  # 0.1 for a batch of 256, whatever the batch

    @dataclass(frozen=True, kw_only=True)
    class Options:
        data_folder: str = option("made-up-images", "folder with train/ and val/; drawn if it is not there")
        size: Literal["tiny", "resnet50"] = option("tiny", "resnet50 for the network of the paper, on 224 pixels")

    def fetch(self):
        if self.options.data_folder == "made-up-images" and not Path(self.options.data_folder).exists():
            _draw(Path(self.options.data_folder))

    def model(self):
        return ResNet(*SIZES[self.options.size][1:], len(self.datasets()[0].classes))

    def train_data(self):
        return ImageFolder(Path(self.options.data_folder) / "train", SIZES[self.options.size][0], augment=True)

    def validation_data(self):
        return ImageFolder(Path(self.options.data_folder) / "val", SIZES[self.options.size][0], augment=False)

    def loss(self, model, batch):
        images, labels = batch
        return cross_entropy(model(images), labels, label_smoothing=0.1)

    def metrics(self, model, batch):
        images, labels = batch
        scores = model(images)
        return {"loss": cross_entropy(scores, labels, reduction="sum"), "accuracy": (scores.argmax(1) == labels).sum()}


def _draw(folder):
    """Noisy images, a colour for each class."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        for n in range(80):
            file = folder / ("train" if n < 64 else "val") / name / f"{n}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            noise = random.integers(0, 128, (40, 40, 3), np.uint8) + 127 * np.eye(3, dtype=np.uint8)[channel]
            Image.fromarray(noise).save(file)
