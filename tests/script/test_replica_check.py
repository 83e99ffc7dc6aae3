"""What makes the workers' copies of a model differ is found, and models that a script has let go of are forgotten."""

from __future__ import annotations

import contextlib
import io
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.script import joining
from tests import programs
from tests.script.loops import Ranks, Weights, data, make, plain_loop, world_loop, world_of


def _part(workers: Workers, folder: str, how: str, found_by: str) -> str:
    """Weights part in the last batch before they are compared."""
    world = world_of(workers)
    model, optimizer = make(has_norm=False)
    world.wrap(model)
    loader = world.loader(DataLoader(data(), batch_size=8))
    try:
        for number, (x, y) in enumerate(loader, 1):
            if number == (5 if found_by == "the end" else 2):
                _move(model, optimizer, F.mse_loss(model(x), y), how)
                if number == 2:
                    break
        assert found_by != "the end"
        world.save(folder) if found_by == "a save" else next(iter(loader))
    except SettingError as error:
        return str(error)
    return ""


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, how: str) -> None:
    if how == "left in":  # gradients of a worker's own are stepped by an optimizer that was not wrapped
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if how == "by hand":
        for parameter in model.parameters():
            (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            parameter.data -= 0.1 * gradient


@pytest.mark.parametrize(
    ("how", "found_by"),
    [
        ("left in", "the next loop"),
        ("left in", "a save"),
        ("left in", "the end"),
        ("by hand", "the end"),
    ],
)
def test_weights_that_have_parted_are_refused_by_the_next_loop_by_its_end_and_by_a_save(
    run_ranks: Ranks, tmp_path: Path, how: str, found_by: str
) -> None:
    first, second = run_ranks(_part, 2, str(tmp_path), how, found_by)
    assert first == second
    assert first.startswith("parameter first.weight differs between rank 0 and rank 1")
    assert not list(tmp_path.iterdir())


class _Running(nn.Module):
    """Keeps means of what it sees: one that is part of the model, and one that is not."""

    mean: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean.lerp(x.detach().mean(dim=0), 0.1)
        self.cache = x.detach().mean(dim=0)
        return x - self.mean


def _printed(workers: Workers, has_norm: bool) -> str:
    world = world_of(workers)
    model, optimizer = make(has_norm=has_norm)
    if not has_norm:
        model.norm = _Running()  # type: ignore[assignment]
    world.wrap(model, optimizer)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        world_loop(world, model, optimizer, world.loader(DataLoader(data(), batch_size=8)), 3)
    return said.getvalue()


UNWRAPPED = """
import sys

import torch

import stormo

world = stormo.World()
model, scale = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.Adam((scale if sys.argv[1] == "beside" else model).parameters(), lr=0.1)
world.wrap(model, *([] if sys.argv[1] == "alone" else [optimizer]))
for x in world.loader(torch.randn(16, 2), global_batch_size=4):
    if sys.argv[1] == "alone":
        model(x).mean().backward()
    else:
        world.backward(scale(model(x)).mean())
        optimizer.step()
    if sys.argv[1] == "attack":  # one for every batch
        noise = torch.zeros_like(x, requires_grad=True)
        other = torch.optim.Adam([noise])
        noise.sum().backward()
    if sys.argv[1] == "each":
        other = torch.optim.Adam(scale.parameters())
    if sys.argv[1] != "none":
        other.step()
    model.zero_grad()
    scale.zero_grad()
"""


@pytest.mark.parametrize(
    ("how", "num_warnings"),
    [("beside", 1), ("alone", 1), ("each", 1), ("attack", 0)],
    ids=str,
)
def test_an_optimizer_that_was_not_wrapped_is_reported_once(tmp_path: Path, how: str, num_warnings: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNWRAPPED)
    done = programs.run([str(script), how], tmp_path, 2)
    # Alone, it has no gradient that is the same everywhere.
    assert (done.returncode == 0) is (how != "alone"), done.stderr
    assert ("parameter weight differs between rank 0 and rank 1" in done.stderr) is (how == "alone")
    line = UNWRAPPED.splitlines().index("        other.step()") + 1
    start = f"stormo: the Adam that steps in script.py line {line} was not passed to world.wrap()"
    assert done.stderr.count(start) == num_warnings, done.stderr
    assert done.stderr.count("stormo: the") == num_warnings, done.stderr


def test_a_buffer_of_each_workers_own_samples_is_reported_once(run_ranks: Ranks) -> None:
    assert run_ranks(_printed, 2, True) == ["", ""]
    main, other = run_ranks(_printed, 2, False)
    assert other == ""
    assert main.startswith("stormo: buffer norm.mean differs between rank 0 and rank 1")
    assert main.count("stormo: ") == 1


def _lost(workers: Workers) -> list[float]:
    """A training that has come to nothing is the same nothing everywhere."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    loader = world.loader(DataLoader(data(), batch_size=19))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y) * math.nan)
            optimizer.step()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def test_weights_that_are_no_numbers_anywhere_are_the_same(run_ranks: Ranks) -> None:
    assert all(math.isnan(value) for values in run_ranks(_lost, 2) for value in values)


def _folds(workers: Workers, folder: str) -> tuple[list[Weights], list[bool], int]:
    world = world_of(workers)
    found, models = [], []

    def fold(number: int) -> Weights:
        model, optimizer = make(has_norm=False, lr=0.1 / (1 + number))
        world.wrap(model, optimizer)
        models.append(weakref.ref(model))
        loader = world.loader(DataLoader(data(30 + number), batch_size=8))
        trained = world_loop(world, model, optimizer, loader, 1)
        world.save(f"{folder}/{number}")
        assert world.load(f"{folder}/{number}") == {}
        return trained

    for number in range(3):
        found.append(fold(number))
    return found, [model() is not None for model in models], len(world._loop.groups)


def test_folds_one_after_the_other_are_as_each_alone(run_ranks: Ranks, tmp_path: Path) -> None:
    for number, (found, are_there, num_groups) in enumerate(run_ranks(_folds, 2, str(tmp_path))):
        assert are_there[:2] == [False, False], number
        assert num_groups == 1
        for fold, trained in enumerate(found):
            model, optimizer = make(has_norm=False, lr=0.1 / (1 + fold))
            expected = plain_loop(model, optimizer, DataLoader(data(30 + fold), batch_size=8), 1)
            for name, value in expected.items():
                torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-14)


def _join_again(workers: Workers) -> str:
    with pytest.raises(SettingError) as caught:
        joining.join(None, None, None)
    return str(caught.value)


def test_a_script_that_has_joined_the_workers_itself_is_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_join_again, 2):
        assert sentence.startswith("stormo.World() was called after torch.distributed.init_process_group()")


def _wrapped_state(_: Any = None) -> Any:
    model, optimizer = make()
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def _own_checkpoint(workers: Workers, path: str) -> bool:
    world = world_of(workers)
    model, optimizer, scheduler = world.wrap(*_wrapped_state())
    loader = world.loader(DataLoader(data(), batch_size=8))
    world_loop(world, model, optimizer, loader, 1, scheduler=scheduler)
    plain = _wrapped_state()
    plain_loop(plain[0], plain[1], DataLoader(data(), batch_size=8), 1, scheduler=plain[2])
    torch.save(scheduler.state_dict(), path)
    return bool(torch.load(path, weights_only=True) == plain[2].state_dict())


def test_a_scripts_own_checkpoint_holds_of_a_scheduler_what_torch_would_save(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(_own_checkpoint, 1, str(tmp_path / "own.pt")) == [True]
