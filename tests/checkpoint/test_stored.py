"""A checkpoint that an earlier version of stormo has written is taken up to the last bit.

`stored/` holds one of format version 1, of two workers under `ddp`, and `expected.json`: the SHA-256 of
everything that each worker had when it was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stormo.checkpoint import load, verify
from stormo.distributed.world import World
from tests.tiny_run import Parts, arrays, build

Ranks = Callable[..., list[Any]]
STORED = Path(__file__).with_name("stored")
FLAGS: dict[str, Any] = {"global_batch_size": 16, "optimizer": "adamw"}


def digests(parts: Parts) -> dict[str, str]:
    """The SHA-256 of everything that a worker holds, by name."""
    strategy = parts.strategy
    held = arrays((f"weight {part.name}", part.local) for part in strategy.shards())
    held |= arrays((f"buffer {name}", buffer) for name, buffer in strategy.named_buffers())
    names = {part.local: part.name for part in strategy.shards()}
    for parameter, state in strategy.optimizer.state.items():
        held |= arrays((f"{key} {names[parameter]}", value) for key, value in state.items())
    held |= {"random": torch.get_rng_state().numpy(), "loss": parts.state.loss_sum.numpy()}
    held["progress"] = np.array([parts.state.progress.step, parts.state.progress.samples_seen])
    return {name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for name, value in held.items()}


def _taken_up(world: World, path: str) -> dict[str, str]:
    parts = build(world, {"num_train": 40}, strategy="ddp", **FLAGS)
    parts.state.restore(world, Path(path), 0)
    return digests(parts)


def test_a_stored_checkpoint_is_restored_to_the_last_bit(run_ranks: Ranks) -> None:
    path = STORED / "ddp" / "step-00000003"
    verify(path)
    assert load(path).state["progress"]["step"] == 3
    expected = json.loads((STORED / "expected.json").read_bytes())
    assert run_ranks(_taken_up, 2, str(path)) == expected["ddp"]
