"""Every schedule gives the gradients, losses and outputs of one process; a split backward and a task's loss in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.config.mesh import Mesh
from stormo.distributed.parallel_dims import ParallelDims, SubGroup
from stormo.errors import SettingError
from stormo.parallel.pipeline.engine import Engine
from stormo.parallel.pipeline.loss_capture import model_inputs, with_output
from stormo.parallel.pipeline.partition import into_stages
from stormo.parallel.pipeline.schedules import Span, idle_share, worker_stages
from stormo.parallel.pipeline.split_backward import backward_inputs, backward_weights
from stormo.parallel.pipeline.split_points import StageModule, find_pieces, keep_only
from stormo.parallel.pipeline.stage import ScheduleTrace
from tests.parallel.pipeline import models
from tests.parallel.pipeline.simulation import Action, pipeline_order

CASES = (
    # model, schedule, stages a worker, micro-batches
    ("gpt", "naive", 1, 1),
    ("gpt", "1f1b", 1, 8),
    ("skipping", "1f1b", 1, 4),
    ("sequential", "gpipe", 1, 2),
)
SEVERAL = (
    ("skipping", "interleaved", 3, 8),
    ("gpt", "zero-bubble", 2, 4),
    ("sequential", "zero-bubble", 3, 4),
    ("sequential", "zero-bubble", 1, 4),
)


def build(world: Any, name: str, schedule: str, per_worker: int, count: int) -> tuple[Any, Engine, SubGroup]:
    group = ParallelDims(Mesh(pipeline=world.size), world.rank, world.device).subgroup("pipeline")
    model, given = models.make(name)
    args, kwargs, _ = models.inputs(name, 2)
    pieces = find_pieces(model, given, call=(args, kwargs))
    stages = into_stages(pieces, per_worker * world.size)
    numbers = worker_stages(group.rank, group.size, len(stages))
    keep_only(model, [piece for number in numbers for piece in stages[number]], pieces)
    engine = Engine(
        [StageModule(stages[number]) for number in numbers],
        num_stages=len(stages),
        group=group,
        device=world.device,
        schedule=schedule,
        num_micro_batches=count,
    )
    return model, engine, group


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
    assert_all_there(cases, run_ranks(compare_all, 2, cases, (8, 5)))


def test_schedules_on_four_workers(run_ranks: Callable[..., list[Any]]) -> None:
    cases = (CASES[1], ("sequential", "interleaved", 2, 4), ("sequential", "zero-bubble", 2, 4))
    assert_all_there(cases, run_ranks(compare_all, 4, cases, (8, 6, 8)))


def traced(world: Any) -> list[tuple[str, list[Span]]]:
    torch.set_default_dtype(torch.float64)
    found = []
    for name, schedule, per_worker, count in (("gpt", "1f1b", 1, 4), *SEVERAL[:2]):
        _, engine, group = build(world, name, schedule, per_worker, count)
        args, kwargs, targets = models.inputs(name, 8)
        engine.forward_backward(args, loss_of(targets, count), kwargs)
        engine.trace = ScheduleTrace(group, world.device)
        for _ in range(2):  # it has the last batch
            engine.forward_backward(args, loss_of(targets, count), kwargs)
        engine.forward(args, kwargs)
        found.append((schedule, engine.trace.gather()))
    return found


def test_trace_has_the_order_of_the_schedule(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(traced, 2)
    assert first == second
    for (schedule, spans), (_, _, per_worker, count) in zip(first, (("", "", 1, 4), *SEVERAL[:2]), strict=True):
        for worker, wanted in enumerate(pipeline_order(schedule, 2, 2 * per_worker, count)):
            own = [span for span in spans if span.worker == worker]
            assert [Action(span.kind, span.stage, span.micro_batch) for span in own] == wanted, schedule
            assert all(before.stop <= after.start for before, after in pairwise(own))
        assert 0 < idle_share(spans, 2) < 1


def autocast(world: Any) -> list[float]:
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
                # In the same parts: a bf16 product of other shapes may sum in another order.
                found.append(difference(output, torch.cat([reference(part) for part in args[0].chunk(4)])))
        assert output.dtype == torch.bfloat16
        assert losses == wanted or not engine.has_last
        named = dict(reference.named_parameters())
        found += [difference(parameter.grad, named[key].grad) for key, parameter in model.named_parameters()]
    warnings.simplefilter("error")
    return found


def test_autocast_is_kept_in_stages(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(autocast, 2):
        assert len(found) > 20
        assert max(found) < 1e-7


class Mixed(nn.Module):
    """Adds the mean of all data workers' samples, as synchronised batch norm takes it."""

    def __init__(self, group: SubGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + self.group.sum(x.detach().mean(0))


def synchronized(world: Any) -> list[Tensor]:
    """A last batch that is of a new shape for one data worker alone."""
    dims = ParallelDims(Mesh(pipeline=2, replicate=2), world.rank, world.device)
    group, data = dims.subgroup("pipeline"), dims.subgroup("replicate")
    engine = Engine(
        [Mixed(data)],
        num_stages=2,
        group=group,
        device=world.device,
        schedule="gpipe",
        num_micro_batches=1,
        synchronized=data,
    )
    sizes = ((4, 4), (2, 4))
    return [engine.forward((torch.full((size[data.rank], 3), 1.0 + data.rank),)) for size in sizes]


def test_stages_that_exchange_tensors_find_shapes_together(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, (first, second) in enumerate(run_ranks(synchronized, 4)):
        own = 1.0 + rank % 2
        # 1 + 2 are added, which makes 4 and 5, and these are added once more.
        assert torch.equal(first, torch.full((4, 3), own + 3 + 9))
        assert torch.equal(second, torch.full((4 if rank % 2 else 2, 3), own + 3 + 9))


class LateBiases(nn.Module):
    """One weight at two places, with a bias for each that comes before it in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.weight, self.far = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.weight, self.one)) * self.frozen
        return F.layer_norm(F.linear(hidden, self.weight, self.two), (8,), self.far * self.far)


@pytest.mark.parametrize("kind", [models.Twice, LateBiases, lambda: models.make("gpt")[0].blocks[0]])
def test_split_backward_equals_the_whole_backward(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind().double()
    width = 16 if hasattr(module, "attention") else 8
    x, unused = torch.randn(3, 5, width, dtype=torch.float64), torch.randn(2)
    whole = x.clone().requires_grad_()
    module(whole).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    part = x.clone().requires_grad_()
    loss = module(part).square().sum()
    found, rest = backward_inputs([loss], None, [part, unused], list(module.parameters()))
    assert torch.equal(found[0], whole.grad)  # type: ignore[arg-type]
    assert found[1] is None
    assert all(parameter.grad is None for parameter in module.parameters())
    backward_weights(rest)
    for name, parameter in module.named_parameters():
        gradient = wanted[name]
        if gradient is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)


class TinyTask:
    """The methods of a task that use a model."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert isinstance(model, models.Skipping)
        device = next(model.parameters()).device  # a habit of many
        try:
            scores = model(x.to(device), kinds=torch.zeros(len(x), dtype=torch.long))
        except Exception as error:
            raise AssertionError("a stand-in stops by something that nobody catches") from error
        return F.cross_entropy(scores, y) if model.training else scores.sum()


def test_loss_runs_with_a_stand_in() -> None:
    model, batch = models.Skipping(), (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    task = TinyTask()
    args, kwargs = model_inputs(lambda model: task.loss(model, batch), model, "TinyTask.loss")
    assert torch.equal(args[0], batch[0])
    assert list(kwargs) == ["kinds"]
    output = model(*args, **kwargs)
    for is_training in (True, False):
        model.train(is_training)
        found = with_output(lambda model: task.loss(model, batch), output, model, "TinyTask.loss")
        assert torch.equal(found, task.loss(model, batch))
    found.backward()
    assert model.head.weight.grad is not None


def test_loss_that_cannot_run_in_a_pipeline_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    output = model(x)
    with pytest.raises(SettingError, match=r"T.loss was called in a pipeline, but it does not call the model"):
        model_inputs(lambda model: x.sum(), model, "T.loss")
    with pytest.raises(SettingError, match="does not call the model"):
        with_output(lambda model: x.sum(), output, model, "T.loss")
    with pytest.raises(SettingError, match="more than once"):
        with_output(lambda model: (model(x) + model(x)).sum(), output, model, "T.loss")
    with pytest.raises(SettingError, match=r"it uses 1\.bias beside the model's output"):
        with_output(lambda model: model(x).sum() + model[1].bias.norm(), output, model, "T.loss")  # type: ignore[index]
