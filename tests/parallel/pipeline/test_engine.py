"""Every schedule gives the gradients, losses and outputs of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stormo.config.mesh import Mesh
from stormo.distributed.parallel_dims import ParallelDims, SubGroup
from stormo.parallel.pipeline.bubble import Span, idle_share
from stormo.parallel.pipeline.engine import Engine
from stormo.parallel.pipeline.orders import Action, orders, stages_of
from stormo.parallel.pipeline.pieces import StageModule, find_pieces, keep_only
from stormo.parallel.pipeline.split import into_stages
from stormo.parallel.pipeline.watching import Watch
from tests.parallel.pipeline import models

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


def build(world: Any, name: str, schedule: str, per_worker: int, count: int) -> tuple[Any, Engine, SubGroup]:
    line = ParallelDims(Mesh(pipeline=world.size), world.rank, world.device).line("pipeline")
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


def loss_of(targets: Tensor, count: int) -> Callable[[Any, int], Tensor]:
    parts = targets.chunk(count)
    return lambda output, k: models.loss_of(output, parts[k]) / count


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
        for key, buffer in models.make(name)[0].named_buffers():
            if key in dict(model.named_buffers()):
                model.get_buffer(key).copy_(buffer)
        model.zero_grad()
        losses = engine.forward_backward(args, loss_of(targets, parts), kwargs)
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


def watched(world: Any) -> list[tuple[str, list[Span]]]:
    torch.set_default_dtype(torch.float64)
    found = []
    for name, schedule, per_worker, count in (("gpt", "1f1b", 1, 4), *SEVERAL[:3]):
        _, engine, line = build(world, name, schedule, per_worker, count)
        args, kwargs, targets = models.inputs(name, 8)
        engine.forward_backward(args, loss_of(targets, count), kwargs)
        engine.watch = Watch(line, world.device)
        for _ in range(2):  # it sees the last pass
            engine.forward_backward(args, loss_of(targets, count), kwargs)
        engine.forward(args, kwargs)
        found.append((schedule, engine.watch.gather()))
    return found


def test_watch_sees_the_order_of_the_schedule(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(watched, 2)
    assert first == second
    for (schedule, spans), (_, _, per_worker, count) in zip(first, (("", "", 1, 4), *SEVERAL[:3]), strict=True):
        for worker, wanted in enumerate(orders(schedule, 2, 2 * per_worker, count)):
            own = [span for span in spans if span.worker == worker]
            assert [Action(span.kind, span.stage, span.micro_batch) for span in own] == wanted, schedule
            assert all(before.stop <= after.start for before, after in pairwise(own))
        assert 0 < idle_share(spans, 2) < 1


def cast(world: Any) -> list[float]:
    """The largest differences from one process under autocast: of gradients, of the loss, of outputs."""
    warnings.simplefilter("ignore")  # some processors multiply bf16 slowly, and torch says so
    found = []
    for schedule, per_worker in (("1f1b", 1), ("zero-bubble", 2)):
        model, engine, _ = build(world, "gpt", schedule, per_worker, 4)
        model.float()
        reference = models.make("gpt")[0].float()
        args, _, targets = models.inputs("gpt", 8)
        wanted = []
        for part, target in zip(args[0].chunk(4), targets.chunk(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = models.loss_of(reference(part).float(), target) / 4
            loss.backward()
            wanted.append(loss.detach())
        in_full = loss_of(targets, 4)
        with torch.autocast("cpu", torch.bfloat16):
            losses = engine.forward_backward(args, lambda out, k, of=in_full: of(out.float(), k))
            output = engine.forward(args)
            with torch.no_grad():
                found.append(difference(output, reference(*args)))
        assert output.dtype == torch.bfloat16
        assert losses == wanted or not engine.has_last
        named = dict(reference.named_parameters())
        found += [difference(parameter.grad, named[key].grad) for key, parameter in model.named_parameters()]
    warnings.simplefilter("error")
    return found


def test_autocast_holds_in_the_stages(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(cast, 2):
        assert len(found) > 20
        assert max(found) < 1e-7


class Mixed(nn.Module):
    """Adds the mean of all data workers' samples, as synchronised batch norm takes it."""

    def __init__(self, line: SubGroup) -> None:
        super().__init__()
        self.line = line

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line.sum(x.detach().mean(0))


def mixed(world: Any) -> list[Tensor]:
    """A last batch that is of a new shape for one data worker alone."""
    grid = ParallelDims(Mesh(pipeline=2, replicate=2), world.rank, world.device)
    line, data = grid.line("pipeline"), grid.line("replicate")
    engine = Engine(
        [Mixed(data)],
        [line.rank],
        num_stages=2,
        line=line,
        device=world.device,
        schedule="gpipe",
        num_micro_batches=1,
        in_step=data,
    )
    sizes = ((4, 4), (2, 4))
    return [engine.forward((torch.full((size[data.rank], 3), 1.0 + data.rank),)) for size in sizes]


def test_shapes_are_learnt_together_where_stages_speak_with_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, (first, second) in enumerate(run_ranks(mixed, 4)):
        own = 1.0 + rank % 2
        # 1 + 2 are added, which makes 4 and 5, and these are added once more.
        assert torch.equal(first, torch.full((4, 3), own + 3 + 9))
        assert torch.equal(second, torch.full((4 if rank % 2 else 2, 3), own + 3 + 9))
