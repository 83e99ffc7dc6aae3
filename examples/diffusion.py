"""A diffusion model on Fashion-MNIST (DDPM, Ho et al., arXiv 2006.11239): a small U-Net predicts the noise in an image.

stormo train examples/diffusion.py --num-gpus 2 --run-name clothes     # a minute on a laptop, on 2,000 images
stormo train examples/diffusion.py --task.num-images 60000 --task.width 64 --epochs 100 --precision bf16
python examples/diffusion.py clothes                                   # draws clothes of a run into diffusion.png
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss, silu
from torch.utils.data import Dataset

import stormo
from stormo.config import option
from stormo.data.fashion_mnist import find_or_fetch, read

NUM_STEPS = 200
BETAS = torch.linspace(1e-4, 0.05, NUM_STEPS)
SIGNAL = (1 - BETAS).cumprod(dim=0)  # the share of an image's variance that is left at each step


class Clothes(Dataset):
    """A noisy image, how noisy it is, and the noise in it."""

    def __init__(self, split, num_images):
        self.images = read(find_or_fetch(None), split)[0][:num_images]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        # Drawn here, step and noise depend on the seed, the epoch and the sample, not on the number of workers.
        step, noise = torch.randint(NUM_STEPS, ()), torch.randn(1, 28, 28)
        image = self.images[index].unsqueeze(0).float() / 127.5 - 1
        return SIGNAL[step].sqrt() * image + (1 - SIGNAL[step]).sqrt() * noise, step, noise


class Block(nn.Module):
    def __init__(self, channels, out, num_time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.skip = nn.Linear(num_time, out), nn.Conv2d(channels, out, 1)

    def forward(self, x, time):
        h = self.conv1(silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.frequencies = nn.Buffer(torch.logspace(0, -3, width // 2), persistent=False)
        self.embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down1, self.down2 = Block(width, width, 4 * width), Block(width, 2 * width, 4 * width)
        self.middle = Block(2 * width, 2 * width, 4 * width)
        self.up2, self.up1 = Block(4 * width, width, 4 * width), Block(2 * width, width, 4 * width)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, step):
        angles = step[:, None] * self.frequencies
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
        high = self.down1(self.first(x), time)  # 28 × 28
        low = self.down2(avg_pool2d(high, 2), time)  # 14 × 14
        x = interpolate(self.middle(avg_pool2d(low, 2), time), scale_factor=2.0)
        x = interpolate(self.up2(torch.cat([x, low], dim=1), time), scale_factor=2.0)
        return self.last(self.up1(torch.cat([x, high], dim=1), time))


class Diffusion(stormo.Task):
    """Noise, step by step, until it is clothes."""

    name = "diffusion"
    defaults: ClassVar = {"optimizer": "adamw", "base_lr": 1e-3, "batch_size": 32, "epochs": 3, "ema": 0.99}

    @dataclass(frozen=True, kw_only=True)
    class Options:
        width: int = option(16, "channels of the first level, a multiple of 4")
        num_images: int = option(2000, "images to train on, of 60,000")

    def fetch(self):
        find_or_fetch(None)

    def model(self):
        return UNet(self.options.width)

    def train_data(self):
        return Clothes("train", self.options.num_images)

    def validation_data(self):
        return Clothes("validation", self.options.num_images // 4)

    def loss(self, model, batch):
        noisy, step, noise = batch
        return mse_loss(model(noisy, step), noise)


@torch.no_grad()
def sample(model, num_images):
    x = torch.randn(num_images, 1, 28, 28)
    for step in reversed(range(NUM_STEPS)):
        noise = model(x, torch.full((num_images,), step))
        x = (x - BETAS[step] / (1 - SIGNAL[step]).sqrt() * noise) / (1 - BETAS[step]).sqrt()
        x += BETAS[step].sqrt() * torch.randn_like(x) * (step > 0)
    return x.clamp(-1, 1)


if __name__ == "__main__":
    from PIL import Image

    images = sample(stormo.open_run(sys.argv[1]).load_model(), 16)
    sheet = images.view(2, 8, 28, 28).transpose(1, 2).reshape(2 * 28, 8 * 28)
    Image.fromarray(((sheet + 1) * 127.5).byte().numpy()).save("diffusion.png")
