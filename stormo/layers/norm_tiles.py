"""Tile shapes of the norm kernels and the grids that follow from them; the shapes are what was fastest on an H200.

Nothing here depends on triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from stormo.layers.kernel_calls import num_multiprocessors

_MAX_PARTIALS = 512  # rows of partial sums: two steps of the finishing kernels
_MAX_GRID = 2**15  # CUDA's limit on a grid's second dimension is 65535

FINISH: dict[str, Any] = {"BLOCK_PARTIALS": 256, "BLOCK_CHANNELS": 8, "num_warps": 4}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The part of the matrix that one program handles at a time, and how."""

    block_rows: int
    block_channels: int
    programs_per_sm: int
    num_warps: int = 4
    num_stages: int = 3  # tiles in flight at a time through shared memory; 1 is through registers only

    @cached_property
    def stream(self) -> dict[str, Any]:
        """The settings of a kernel that writes a value an element."""
        return {
            "BLOCK_ROWS": self.block_rows,
            "BLOCK_CHANNELS": self.block_channels,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
        }

    @cached_property
    def reduction(self) -> dict[str, Any]:
        """The settings of a kernel that sums over rows."""
        # In bf16 a thread reads 16 bytes, 8 channels, so a load instruction covers so many rows: rows this far apart
        # belong to one thread and are summed in its registers. In fp32 it is two loads.
        kept = self.num_warps * 32 * 8 // self.block_channels
        return {**self.stream, "ROWS_KEPT": min(max(kept, 1), self.block_rows)}


# In bf16 a thread reads 16 bytes. Widths of 32 and 64 divide the usual channel counts, so no lane idles; three tiles in
# flight hide the latency of memory. Sums are made in one wave of programs, without a tail; element-wise programs come
# in a few waves, which the hardware balances.
TILES = {
    "statistics": Tile(block_rows=128, block_channels=32, programs_per_sm=4),
    "apply": Tile(block_rows=64, block_channels=64, programs_per_sm=32),
    "gradient_sums": Tile(block_rows=32, block_channels=64, programs_per_sm=4),
    "input_gradient": Tile(block_rows=32, block_channels=64, programs_per_sm=32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The rows and channels of one call, and how they are shared out among programs."""

    num_rows: int
    num_channels: int
    num_sms: int

    @staticmethod
    def of(x: Tensor) -> Matrix:
        """The matrix of a tensor whose dimension 1 is channels."""
        num_channels = x.shape[1]
        return Matrix(
            num_rows=x.numel() // num_channels, num_channels=num_channels, num_sms=num_multiprocessors(x.device)
        )

    def reduce_grid(self, tile: Tile) -> tuple[int, int]:
        """Channel blocks first: neighbouring programs read neighbouring bytes of the same rows."""
        num_blocks = -(-self.num_channels // tile.block_channels)
        num_tiles = -(-self.num_rows // tile.block_rows)
        return num_blocks, max(1, min(num_tiles, _MAX_PARTIALS, tile.programs_per_sm * self.num_sms // num_blocks))

    def stream_grid(self, tile: Tile) -> tuple[tuple[int, int], int]:
        """The grid of an element-wise kernel and the number of tiles of each program."""
        num_blocks = -(-self.num_channels // tile.block_channels)
        num_tiles = -(-self.num_rows // tile.block_rows)
        num_programs = max(1, min(num_tiles, _MAX_GRID, tile.programs_per_sm * self.num_sms // num_blocks))
        tiles_each = -(-num_tiles // num_programs)
        return (num_blocks, -(-num_tiles // tiles_each)), tiles_each

    def finish_grid(self) -> tuple[int]:
        """The grid of the finishing kernels."""
        return (-(-self.num_channels // int(FINISH["BLOCK_CHANNELS"])),)
