"""A small snapshot that has a bit of everything, made anew for every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stormo.checkpoint import Snapshot

MakeSnapshot = Callable[[int], Snapshot]


def make_snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(8, 3, 3, 3, generator=generator)
    return Snapshot(
        model={
            "conv.weight": weight.to(memory_format=torch.channels_last),
            "conv.bias": torch.randn(8, generator=generator).bfloat16(),
            "norm.num_batches_tracked": torch.tensor(step),
            "tied.a": weight[0],
            "tied.b": weight[0],
            "mask": torch.tensor([True, False, True]),
            "empty": torch.empty(0, 4),
        },
        optimizer={"conv.weight|momentum_buffer": torch.randn(8, 3, 3, 3, generator=generator)},
        ranks={"0/torch_rng": torch.arange(64, dtype=torch.uint8), "1/torch_rng": torch.arange(64, dtype=torch.uint8)},
        state={"step": step, "epoch": 1, "nested": {"losses": [0.1, None, True], "text": "è"}},
    )


def assert_same(a: Snapshot, b: Snapshot) -> None:
    for part in ("model", "optimizer", "ranks"):
        left, right = getattr(a, part), getattr(b, part)
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype
            assert torch.equal(left[name], right[name])
    assert a.state == b.state


@pytest.fixture(name="make_snapshot")
def _make_snapshot() -> MakeSnapshot:
    return make_snapshot


@pytest.fixture(name="assert_same")
def _assert_same() -> Callable[[Snapshot, Snapshot], None]:
    return assert_same
