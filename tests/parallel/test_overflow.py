"""A first step in fp16 that overflows is left out, and the second starts from sound state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from stormo.distributed.world import World
from tests.tiny_run import arrays, build, steps


@contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _two_steps(world: World, overflow: bool, flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = build(world, {"dropout": 0.0, "num_train": 16, "norm": False}, precision="fp16", batch_size=16, **flags)
    strategy, sound = parts.strategy, {"scale": 1024.0}
    before = arrays(strategy.module.named_parameters())
    with _unset_memory_is_nan():
        if overflow:
            strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), "scale": 1e30})
            steps(parts, 1)
            assert all(np.array_equal(before[n], v) for n, v in arrays(strategy.module.named_parameters()).items())
        parts.state.progress.epoch, parts.state.progress.position = 1, 0
        strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), **sound})
        steps(parts, 1)
    return before, arrays(strategy.module.named_parameters())


@pytest.mark.parametrize(
    "flags", [{"optimizer": "sgd"}, {"optimizer": "sgd", "clip_norm": 0.5}, {"optimizer": "adamw"}]
)
def test_a_first_step_that_is_left_out_has_no_effect_on_the_second(
    run_ranks: Callable[..., list[Any]], flags: dict[str, Any]
) -> None:
    ((before, expected),) = run_ranks(_two_steps, 1, False, flags)
    ((_, actual),) = run_ranks(_two_steps, 1, True, flags)
    for name, value in expected.items():
        assert not np.array_equal(value, before[name])
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)  # NaN fails
