"""Every generator goes on where it was."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from stormo.checkpoint import collect_random_state, restore_random_state
from stormo.errors import StormoError


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(20).tolist(),
        torch.randperm(50).tolist(),
    ]


@pytest.fixture(autouse=True)
def _leave_the_generators_alone() -> Any:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@pytest.mark.parametrize("num_draws_before", [0, 1, 2])  # odd: the second half of a Gaussian pair is pending
def test_the_next_numbers_are_the_same_after_a_restore(num_draws_before: int) -> None:
    for _ in range(num_draws_before):
        draw()
    tensors, values = collect_random_state()
    expected = draw()
    draw()
    assert restore_random_state(tensors, json.loads(json.dumps(values))) == ()
    assert draw() == expected


def test_collecting_changes_nothing() -> None:
    tensors, values = collect_random_state()
    expected = draw()
    restore_random_state(tensors, values)
    collect_random_state()
    assert draw() == expected


def test_what_was_collected_does_not_follow_the_generator() -> None:
    tensors, _ = collect_random_state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    draw()
    assert all(torch.equal(tensors[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["torch_rng", "python_rng", "numpy_rng"])
def test_a_missing_or_short_state_is_told(name: str) -> None:
    tensors, values = collect_random_state()
    short = {**tensors, name: tensors[name][:5]}
    with pytest.raises(StormoError, match="cannot be restored"):
        restore_random_state(short, values)
    del tensors[name]
    with pytest.raises(StormoError, match=f"has no '{name}'"):
        restore_random_state(tensors, values)


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_position_outside_of_numpys_memory_is_refused(position: int) -> None:
    tensors, values = collect_random_state()
    values["numpy"]["position"] = position
    with pytest.raises(StormoError, match="624 words"):
        restore_random_state(tensors, values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_state_that_cannot_be_restored_is_told() -> None:
    tensors, values = collect_random_state()
    assert "cuda_rng" not in tensors
    tensors["cuda_rng"] = torch.zeros(16, dtype=torch.uint8)
    (notice,) = restore_random_state(tensors, values)
    assert "no CUDA device" in notice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_generator_goes_on_where_it_was() -> None:
    torch.cuda.init()
    torch.rand(7, device="cuda")
    tensors, values = collect_random_state()
    assert tensors["cuda_rng"].device.type == "cpu"
    expected = torch.rand(7, device="cuda")
    torch.rand(7, device="cuda")
    assert restore_random_state(tensors, values) == ()
    assert torch.equal(torch.rand(7, device="cuda"), expected)
    del tensors["cuda_rng"]
    assert "without a CUDA device" in restore_random_state(tensors, values)[0]
