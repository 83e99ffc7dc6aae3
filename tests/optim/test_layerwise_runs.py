"""Whole runs with the layer-wise optimizers: two workers train what one does, and one goes on with what two saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stormo import checkpoint
from stormo.distributed.world import World
from tests.optim.layers import KINDS
from tests.parallel.test_base import _two_steps
from tests.tiny_run import arrays, assert_same_bits, build, optimizer_arrays, steps

OPTIONS: dict[str, Any] = {"num_train": 40, "dropout": 0.0, "norm": False}
FLAGS: dict[str, Any] = {"global_batch_size": 16, "weight_decay": 0.01, "precision": "fp64", "accumulate": 2}


def _train(world: World, name: str, num_steps: int, folder: str, resumes: bool) -> tuple[Any, Any, Any]:
    parts = build(world, OPTIONS, optimizer=name, **FLAGS)
    if resumes:
        (found,) = checkpoint.find(folder)
        parts.state.restore_snapshot(world, checkpoint.load(found.path) if world.is_main else None, 0)
    restored = optimizer_arrays(parts.strategy)
    steps(parts, num_steps)
    if not resumes:
        snapshot = parts.state.snapshot(world, 0)
        if snapshot is not None:
            checkpoint.save(folder, snapshot, checkpoint.RetentionPolicy(step=num_steps, identity="", keep_last=1))
    return arrays(parts.strategy.module.named_parameters()), optimizer_arrays(parts.strategy), restored


@pytest.mark.parametrize("name", KINDS)
def test_two_workers_and_a_resumed_one_train_as_one_does(
    run_ranks: Callable[..., list[Any]], name: str, tmp_path: Path
) -> None:
    ((weights, state, _),) = run_ranks(_train, 1, name, 7, str(tmp_path / "whole"), False)
    (_, two_state, _), (other_weights, other_state, _) = run_ranks(_train, 2, name, 4, str(tmp_path / "two"), False)
    assert_same_bits(two_state, other_state)
    ((resumed, resumed_state, restored),) = run_ranks(_train, 1, name, 3, str(tmp_path / "two"), True)
    assert_same_bits(restored, two_state)
    assert resumed_state.keys() == state.keys()
    assert all(not np.array_equal(value, other_weights[key]) for key, value in resumed.items())
    for ours, whole in ((resumed, weights), (resumed_state, state)):
        for key, value in whole.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", KINDS)
def test_a_first_step_that_overflows_has_no_effect_on_the_second(
    run_ranks: Callable[..., list[Any]], name: str
) -> None:
    flags = {"optimizer": name, "weight_decay": 0.01, "clip_norm": 0.5}
    ((before, expected),) = run_ranks(_two_steps, 1, False, flags)
    ((_, actual),) = run_ranks(_two_steps, 1, True, flags)
    for key, value in expected.items():
        assert not np.array_equal(value, before[key])
        np.testing.assert_allclose(actual[key], value, rtol=1e-6, err_msg=key)  # NaN fails
