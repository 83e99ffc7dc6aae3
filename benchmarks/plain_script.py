"""A one-GPU training script as a user would write it, before stormo: the other side of `time_to_accuracy`.

Plain modules, a DataLoader with workers, SGD with momentum, torch's default number formats. It imports nothing of
stormo but the reader of the data set's files.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

START_S = time.time()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from benchmarks.command import data_folder  # noqa: E402
from stormo.data.fashion_mnist import read  # noqa: E402


def conv_bn_relu(in_channels: int, out_channels: int) -> nn.Sequential:
    """3×3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


class Block(nn.Module):
    """A residual block."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = conv_bn_relu(in_channels, out_channels)
        self.dropout = nn.Dropout(0.01)
        self.conv2 = conv_bn_relu(out_channels, out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions plus the input."""
        out: Tensor = self.conv2(self.dropout(self.conv1(x))) + self.shortcut(x)
        return out


def wide_resnet(width: int) -> nn.Sequential:
    """The documents' network at width 10."""
    a, b, c = 16 * width, 32 * width, 64 * width
    return nn.Sequential(
        conv_bn_relu(1, 16),
        Block(16, a),
        Block(a, a),
        nn.MaxPool2d(2),
        Block(a, b),
        Block(b, b),
        nn.MaxPool2d(2),
        Block(b, c),
        Block(c, c),
        nn.AvgPool2d(7),
        nn.Flatten(),
        nn.Linear(c, 10),
    )


def dataset(folder: Path, split: str) -> TensorDataset:
    """Images in [0, 1] and labels."""
    images, labels = read(folder, split)  # type: ignore[arg-type]
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def main() -> None:
    """Train until 85 % are held for two epochs; print one line of JSON last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(data_folder(options.data_folder))
    train = DataLoader(
        dataset(folder, "train"), options.batch_size, shuffle=True, num_workers=options.workers, pin_memory=True
    )
    validation = DataLoader(dataset(folder, "validation"), options.batch_size)
    model = wide_resnet(options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    train_time_s, streak, images_per_s = 0.0, 0, 0.0
    for epoch in range(1, options.epochs + 1):
        model.train()
        began = time.perf_counter()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)  # noqa: PLW2901
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - began
        train_time_s += elapsed_s
        images_per_s = len(train.dataset) / elapsed_s  # type: ignore[arg-type]
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in validation:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
        accuracy = correct / len(validation.dataset)  # type: ignore[arg-type]
        print(f"epoch {epoch}: {elapsed_s:.2f} s, {images_per_s:.0f} images/s, accuracy {accuracy:.4f}", flush=True)
        streak = streak + 1 if accuracy >= 0.85 else 0
        if streak == 2:
            break
    summary = {"images_per_s": images_per_s, "train_time_s": train_time_s, "wall_time_s": time.time() - START_S}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
