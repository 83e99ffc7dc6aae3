"""Bytes of weights, gradients and optimizer state of a rank when a GPT of 1 billion parameters is sharded over 256.

    python -m benchmarks.mesh_bytes [--preset 1b] [--ranks 256]

One process without communication and without memory for the model: torch's fake process group and fake tensors, under
the real strategies (see `benchmarks.fake_workers`). Each takes a whole step of AdamW in float32; then the memory of all
tensors alive is counted as `benchmarks.memory` counts it, with gradients and state in place. Shown is the rank that
holds most: the first of its line along every axis, and of the stages of a pipeline the largest. Activations are not in
it. Where a preset cannot use all ranks (16 heads, 22 pieces of a pipeline), it is multiplied by copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import aligned, result_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """What one rank holds."""

    weights: int
    gradients: int
    state: int
    total: int  # of all tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A strategy on `num_ranks` ranks."""

    name: str
    num_ranks: int
    flags: Mapping[str, Any]
    stages: int = 1  # workers of the axis pipeline

    @property
    def ranks(self) -> list[int]:
        """The first rank of every stage."""
        return [stage * (self.num_ranks // self.stages) for stage in range(self.stages)]


def every_row(num_ranks: int) -> Iterator[Row]:
    """Presets, then products."""
    for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hybrid"):
        yield Row(name=name, num_ranks=num_ranks, flags={"strategy": name})
    copies = num_ranks // 16
    tensor, pipeline = f"replicate={copies},tensor=16", f"pipeline=16,replicate={copies}"
    yield Row(name=f"tensor, {copies} copies", num_ranks=num_ranks, flags={"mesh": tensor})
    yield Row(name=f"pipeline, {copies} copies", num_ranks=num_ranks, flags={"mesh": pipeline}, stages=16)
    yield Row(name="naive, 16 ranks", num_ranks=16, flags={"strategy": "naive"}, stages=16)
    eighth = num_ranks // 8
    for zero in (1, 2, 3):
        mesh = f"shard={eighth},tensor=8"
        yield Row(name=f"{mesh}, zero {zero}", num_ranks=num_ranks, flags={"mesh": mesh, "zero": zero})
    for mesh, stages in (
        (f"replicate=4,shard={eighth // 4},tensor=8", 1),
        (f"pipeline=8,shard={eighth}", 8),
        (f"pipeline=8,shard={eighth // 8},tensor=8", 8),
        (f"pipeline=4,replicate=2,shard={eighth // 8},tensor=8", 4),
    ):
        yield Row(name=mesh, num_ranks=num_ranks, flags={"mesh": mesh}, stages=stages)


def measure(row: Row, preset: str, rank: int) -> Bytes:
    """Build the strategy as one rank has it, let it step, and count."""
    from benchmarks import held_bytes
    from benchmarks.fake_workers import stepped
    from stormo.tasks.language_model import SIZES

    before = held_bytes.living()
    with stepped(row.flags, SIZES[preset], rank, row.num_ranks) as (strategy, task):
        data = held_bytes.storages_of(tensor for data in task.datasets() for tensor in getattr(data, "tensors", ()))
        return Bytes(
            weights=held_bytes.num_bytes(held_bytes.weights(strategy)),
            gradients=held_bytes.num_bytes(held_bytes.gradients(strategy)),
            state=held_bytes.num_bytes(held_bytes.optimizer_state(strategy.optimizer)),
            total=held_bytes.num_bytes(held_bytes.living(), without=before | data),
        )


def table(found: Sequence[tuple[Row, Bytes]]) -> list[str]:
    """In millions of bytes."""
    head = ["strategy", "ranks", "weights", "gradients", "state", "in all"]
    rows = [
        [row.name, str(row.num_ranks), *(f"{n / 1e6:,.1f}" for n in (one.weights, one.gradients, one.state, one.total))]
        for row, one in found
    ]
    return aligned([head, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Build all, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b", help="size of the GPT (default: 1b)")
    parser.add_argument("--ranks", type=int, default=256, help="a multiple of 64 (default: 256)")
    options = parser.parse_args(arguments)
    if options.ranks < 64 or options.ranks % 64:
        parser.error(f"--ranks {options.ranks} is no multiple of 64, which the meshes are made of")
    found = []
    for row in every_row(options.ranks):
        print(f"building {row.name} ...", file=sys.stderr, flush=True)
        found.append((row, max((measure(row, options.preset, rank) for rank in row.ranks), key=lambda one: one.total)))
    print(f"GPT {options.preset} in float32 under AdamW; millions of bytes on the rank that holds most")
    print("\n".join(table(found)))
    print(result_line({"presets": len(found), "max_bytes_per_rank": max(one.total for _, one in found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
