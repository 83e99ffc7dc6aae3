"""Every schedule gives the gradients, losses and outputs of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stormo.errors import SettingError
from stormo.mesh import Mesh
from stormo.pipeline.bubble import idle_share
from stormo.pipeline.engine import Engine
from stormo.pipeline.orders import orders, stages_of
from stormo.pipeline.pieces import StageModule, find_pieces, keep_only
from stormo.pipeline.split import into_stages
from stormo.pipeline.watching import Watch
from stormo.world.grid import Grid, Line
from tests.pipeline import models

CASES = (
    # model, schedule, stages a worker, micro-batches
    ("gpt", "naive", 1, 1),
    ("gpt", "gpipe", 1, 4),
    ("gpt", "1f1b", 1, 8),
    ("skipping", "1f1b", 1, 4),
    ("sequential", "gpipe", 1, 2),
)
SEVERAL = (
    ("gpt", "interleaved", 2, 4),
    ("skipping", "interleaved", 3, 8),
    ("gpt", "zero-bubble", 3, 8),
    ("skipping", "zero-bubble", 2, 4),
    ("sequential", "zero-bubble", 3, 4),
    ("sequential", "zero-bubble", 1, 4),
)


def build(world: Any, name: str, schedule: str, per_worker: int, count: int) -> tuple[Any, Engine, Line]:
    line = Grid(Mesh(pipeline=world.size), world.rank, world.device).line("pipeline")
    model, given = models.make(name)
    args, kwargs, _ = models.inputs(name, 2)
    pieces = find_pieces(model, given, call=(args, kwargs))
    stages = into_stages(pieces, per_worker * world.size)
    numbers = stages_of(line.rank, line.size, len(stages))
    keep_only(model, [piece for number in numbers for piece in stages[number]], pieces)
    engine = Engine(
        [StageModule(stages[number]) for number in numbers],
        numbers,
        num_stages=len(stages),
        line=line,
        device=world.device,
        schedule=schedule,
        num_micro_batches=count,
    )
    return model, engine, line


def difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        assert ours is theirs
        return 0.0
    return float((ours - theirs).abs().max())


def compare(world: Any, name: str, schedule: str, per_worker: int, count: int, sizes: tuple[int, ...]) -> list[str]:
    """Gradients, losses and buffers of some batches against one process; returns the parameters of this worker."""
    model, engine, _ = build(world, name, schedule, per_worker, count)
    for num_samples in sizes:
        args, kwargs, targets = models.inputs(name, num_samples)
        parts = engine.num_micro_batches(num_samples)
        reference, wanted = models.alone(name, num_samples, parts)
        size = num_samples // parts
        for key, buffer in models.make(name)[0].named_buffers():
            if key in dict(model.named_buffers()):
                model.get_buffer(key).copy_(buffer)
        model.zero_grad()
        losses = engine.forward_backward(
            args, lambda out, k: models.loss_of(out, targets[k * size : (k + 1) * size]) / parts, kwargs
        )
        assert len(losses) == (parts if engine.has_last else 0)
        for loss, other in zip(losses, wanted, strict=False):
            assert difference(loss, other) < 1e-12, (name, schedule, num_samples)
        gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
        for key, parameter in model.named_parameters():
            off = difference(parameter.grad, gradients[key])
            assert off < 1e-12, (name, schedule, num_samples, key, off)
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, reference.get_buffer(key)), (name, schedule, num_samples, key)
        model.eval()
        reference.eval()
        with torch.no_grad():
            assert difference(engine.forward(args, kwargs), reference(*args, **kwargs)) < 1e-12, (name, schedule)
        model.train()
    return [key for key, _ in model.named_parameters()]


def compare_all(world: Any, cases: tuple[Any, ...], sizes: tuple[int, ...]) -> list[list[str]]:
    torch.set_default_dtype(torch.float64)
    return [compare(world, *case, sizes) for case in cases]


def assert_all_there(cases: tuple[Any, ...], results: list[list[list[str]]]) -> None:
    """Every parameter is on exactly one worker, under its name in the whole model."""
    for index, (name, *_) in enumerate(cases):
        held = [key for worker in results for key in worker[index]]
        assert sorted(held) == sorted(key for key, _ in models.make(name)[0].named_parameters())


# The second batch is the last of an epoch: no number of equal micro-batches from two up fits its five samples.
def test_schedules_on_two_workers(run_ranks: Callable[..., list[Any]]) -> None:
    cases = (*CASES, *SEVERAL)
    assert_all_there(cases, run_ranks(compare_all, 2, cases, (8, 5, 8)))


def test_schedules_on_four_workers(run_ranks: Callable[..., list[Any]]) -> None:
    cases = (CASES[2], CASES[3], ("sequential", "interleaved", 2, 4), ("sequential", "zero-bubble", 2, 4))
    assert_all_there(cases, run_ranks(compare_all, 4, cases, (8, 6)))
