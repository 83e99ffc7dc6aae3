"""A GPT (Radford et al., 2019): pre-norm blocks of causal attention and a GELU MLP, in plain modules.

Learned positions; linear layers without biases. It knows nothing of devices or distribution. Under autocast to bf16 the
residual stream is bf16 as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.layers.gelu import gelu
from stormo.tasks.language_model import Size


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        # One product instead of three keeps a GPU's matrix units busier. Its rows are ordered by head, then query, key
        # and value, so that a cut of the rows into equal parts gives each part whole heads.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same."""
        query, key, value = self._split_products(x) if self._splits(x) else self._product(x)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _product(self, x: Tensor) -> Sequence[Tensor]:
        """Query, key and value, [n, heads, length, width / heads] each."""
        num_samples, length, width = x.shape
        # -1 for the heads: half of the rows are half of the heads.
        return self.qkv(x).view(num_samples, length, -1, 3, width // self.num_heads).transpose(1, 2).unbind(3)  # type: ignore[no-any-return]

    def _splits(self, x: Tensor) -> bool:
        # In fp32 and fp64 compiling must not change the order of sums. A layer of another class has its own product.
        is_half = torch.is_autocast_enabled(x.device.type)
        return is_half and torch.compiler.is_compiling() and type(self.qkv) is nn.Linear

    def _split_products(self, x: Tensor) -> Sequence[Tensor]:
        """The same by three products: once compiled, faster than one, whose gradient is copied together from three."""
        num_samples, length, width = x.shape
        weights = self.qkv.weight.view(self.num_heads, 3, width // self.num_heads, width).unbind(1)
        products = [F.linear(x, weight.flatten(0, 1)) for weight in weights]
        return [each.view(num_samples, length, self.num_heads, -1).transpose(1, 2) for each in products]


class Block(nn.Module):
    """Attention, then an MLP four times as wide, each on its normalised input and added to it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Token and position embeddings, blocks, a last norm, and a head that scores every token as the next one."""

    def __init__(self, size: Size, *, block: int, vocabulary: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(block, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads, dropout) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        # Not tied to the embedding: with so few tokens a second table costs next to nothing, and the first and
        # the last layer can live on different devices.
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self._initialise(size.num_layers)

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # norms: 1 and 0
            # What is added to the residual stream is scaled down, so that its size does not grow with the depth.
            is_residual = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [n, length] -> scores of the next one [n, length, vocabulary]."""
        x = embed(self.tokens, self.positions, self.dropout, tokens)
        for block in self.blocks:
            x = block(x)
        return score(self.norm, self.head, x)


def embed(table: nn.Module, positions: nn.Module, dropout: nn.Module, tokens: Tensor) -> Tensor:
    """Token numbers [n, length] -> what the first block takes, [n, length, width]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    x: Tensor = dropout(table(tokens) + positions(places))
    # bf16 halves the bytes of every residual sum and norm. Not fp16, whose range a deep residual stream may leave.
    kind = x.device.type
    is_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.to(torch.bfloat16) if is_bf16 and x.dtype == torch.float32 else x


def score(norm: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    """What the last block gives -> scores [n, length, vocabulary]."""
    return head(norm(x))  # type: ignore[no-any-return]
