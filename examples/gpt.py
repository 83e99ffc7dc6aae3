"""A GPT on the bytes of text files, by default the sources of Python's standard library.

    stormo train examples/gpt.py --num-gpus 2
    stormo train examples/gpt.py --task.text 'books/*.txt' --task.width 768 --task.depth 12 --task.block 1024 \
        --task.num-bytes 1000000000 --batch-size 16 --precision bf16 --compile --strategy fsdp --num-gpus 8

`gpt_world.py` trains the same model in a loop of its own.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import stormo
from stormo.config import option
from stormo.data import TensorData


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.num_heads = max(width // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Reads bytes [n, length], gives scores of the byte after each [n, length, 256]."""

    def __init__(self, width, depth, block):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text):
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def read_windows(pattern, block, num_bytes):
    """Windows of block + 1 bytes [n, block + 1], for training and, the last twentieth, for validation."""
    folder, name = Path(pattern).parent if pattern else Path(os.__file__).parent, Path(pattern or "*.py").name
    text = b"".join(file.read_bytes() for file in sorted(folder.glob(name)))[:num_bytes]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, block + 1, block)
    num_validation = max(len(windows) // 20, 1)
    return windows[:-num_validation], windows[-num_validation:]


def next_byte_loss(model, windows):
    windows = windows.long()
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class ByteGpt(stormo.Task):
    """The next byte of a text."""

    name = "byte-gpt"
    defaults: ClassVar = {
        "optimizer": "adamw",
        "base_lr": 1e-3,
        "base_batch_size": 32,
        "lr_rule": "sqrt",
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "batch_size": 32,
        "warmup_epochs": 0.2,
        "decay": "cosine",
        "epochs": 2,
    }

    @dataclass(frozen=True, kw_only=True)
    class Options:
        text: str | None = option(None, "files to read, such as 'books/*.txt'; default: Python's own sources")
        width: int = option(64, "width of the model; a head for every 64")
        depth: int = option(3, "blocks")
        block: int = option(64, "bytes of a sample")
        num_bytes: int = option(300_000, "bytes to read")

    def model(self):
        return GPT(self.options.width, self.options.depth, self.options.block)

    def train_data(self):
        return TensorData(self._windows()[0].contiguous())

    def validation_data(self):
        return TensorData(self._windows()[1].contiguous())

    def _windows(self):
        return read_windows(self.options.text, self.options.block, self.options.num_bytes)

    def loss(self, model, batch):
        return next_byte_loss(model, batch[0])
