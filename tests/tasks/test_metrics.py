"""What a task may return from metrics(), and what is said of anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.tasks.metrics import held_metrics, is_metric
from stormo.tasks.task import Task
from stormo.training.validation import Validation

Ranks = Callable[..., list[Any]]


class Measuring(Task):
    """Numbers 0, 1, 2, …, of which `measure` makes metrics."""

    def __init__(self, measure: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__(None)
        self.measure = measure
        vars(self).update(attributes)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return self.measure(self, batch[0])


def _run(task: Measuring, world: World | None = None, num_samples: int = 7, batch_size: int = 3) -> dict[str, float]:
    data = TensorData(torch.arange(num_samples))
    validation = Validation(task, data, batch_size, world or World(alone(), torch.device("cpu")))
    *_, found = validation.run(nn.Linear(1, 1), nullcontext)
    assert found is not None
    return found


def test_sums_may_be_tensors_and_numbers_of_any_kind() -> None:
    found = _run(
        Measuring(
            lambda task, x: {
                "tensor": x.sum(),
                "half": x.sum().half(),
                "int": int(x.sum()),
                "bool": bool((x == 0).any()),
                "numpy": np.float32(x.sum()),
                "fraction": Fraction(int(x.sum()), 2),
            }
        )
    )
    assert found == {"tensor": 3.0, "half": 3.0, "int": 3.0, "bool": 1 / 7, "numpy": 3.0, "fraction": 1.5}


class Own:
    """A metric that is not torchmetrics'."""

    def __init__(self) -> None:
        self.most = 0

    def update(self, x: Tensor) -> None:
        self.most = max(self.most, int(x.max()))

    def compute(self) -> Any:
        return {"most": self.most, "parts": {"half": torch.tensor([self.most / 2])}}

    def reset(self) -> None:
        self.most = 0

    def to(self, device: torch.device) -> Own:
        return self


def _own(task: Any, x: Tensor) -> Any:
    task.own.update(x)
    return {"own": task.own}


def test_any_object_with_the_four_methods_is_a_metric_and_dicts_are_flattened() -> None:
    task = Measuring(_own, own=Own())
    assert _run(task) == {"own/most": 6.0, "own/parts/half": 3.0}
    assert _run(task, num_samples=4) == {"own/most": 3.0, "own/parts/half": 1.5}
    assert not any(is_metric(value) for value in ({}, Own, torch.zeros(1)))


def test_metrics_are_found_wherever_a_task_keeps_them() -> None:
    first, second, third = SumMetric(), SumMetric(), MetricCollection([SumMetric()])
    task = Measuring(_own, a=first, b={"c": [second]}, d=nn.ModuleDict({"e": third}), many=[Own()] * 5000)
    task._datasets = ([Own()], [Own()])  # type: ignore[assignment]
    assert [id(metric) for metric in held_metrics(task)] == [id(first), id(second), id(third)]


class Entries(Metric):
    """Keeps a tensor for each batch, as some metrics do, and a state that takes its shape with the first batch."""

    entries: list[Tensor]
    columns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("entries", default=[], dist_reduce_fx=None)
        self.add_state("columns", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.entries.append(x.sum())
        self.columns = self.columns + torch.tensor([1, 2])

    def compute(self) -> Any:
        return {"sum": torch.stack(self.entries).sum(), "num": len(self.entries), "columns": self.columns.sum()}


class Most(CatMetric):
    """The largest number, found among all of them."""

    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).max()


def _torchmetrics(world: World, num_samples: int) -> list[dict[str, float]]:
    def measure(task: Any, x: Tensor) -> Any:
        task.mean.update(x.double())
        task.most.update(x.double())
        task.entries.update(x)
        task.several.update(nn.functional.one_hot(x % 3, 3).float(), x % 2)
        return {name: getattr(task, name) for name in ("mean", "most", "entries", "several")}

    several = MetricCollection({a: MulticlassAccuracy(3, average=a) for a in ("micro", "macro")})
    task = Measuring(measure, mean=MeanMetric(sync_on_compute=False), most=Most(), entries=Entries(), several=several)
    found = [_run(task, world, num_samples) for _ in range(2)]
    assert "_sync_dist" not in vars(task.most)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("num_samples", [23, 4, 3])  # eight batches, two and one, for three ranks
def test_states_of_every_kind_are_gathered_from_all_ranks_epoch_after_epoch(run_ranks: Ranks, num_samples: int) -> None:
    ((expected, again),) = run_ranks(_torchmetrics, 1, num_samples)
    numbers = list(range(num_samples))
    assert expected == again
    assert expected["mean"] == pytest.approx(sum(numbers) / num_samples)
    assert expected["most"] == numbers[-1]
    assert expected["entries/sum"] == sum(numbers)
    assert expected["entries/num"] == -(-num_samples // 3)
    assert expected["several/micro"] == pytest.approx(sum(i % 3 == i % 2 for i in numbers) / num_samples)
    for ranked in run_ranks(_torchmetrics, 3, num_samples):
        for metrics in ranked:
            assert metrics == pytest.approx(expected, rel=1e-6)


def _foreign(world: World) -> str:
    try:
        _run(Measuring(_own, own=Own()), world)
    except SettingError as error:
        return str(error)
    return ""


def test_an_object_that_cannot_gather_is_refused_on_several_workers(run_ranks: Ranks) -> None:
    for text in run_ranks(_foreign, 2):
        assert text.startswith("metrics() returned an object of type Own as 'own', but it cannot gather what 2 workers")


def _differing(world: World) -> str:
    try:
        _run(Measuring(lambda task, x: {"a" if world.is_main else "b": x.sum()}), world)
    except SettingError as error:
        return str(error)
    return ""


def test_names_that_differ_between_workers_are_refused(run_ranks: Ranks) -> None:
    for text in run_ranks(_differing, 2):
        assert text.startswith("Measuring.metrics() returned a for one batch, but it returned b for another")


def _matrix(task: Any, x: Tensor) -> Any:
    task.matrix.update(x % 3, x % 3)
    return {"matrix": task.matrix}


@pytest.mark.parametrize(
    ("measure", "sentence"),
    [
        (
            lambda task, x: x.sum(),
            r"returned a value of type Tensor, but each value is reported under its name; return a",
        ),
        (lambda task, x: {"a": x}, r"returned 'a' as a tensor of shape \[3\], but .* one number; return its \.sum\(\)"),
        (
            lambda task, x: {"a": "high"},
            r"returned 'a' as a value of type str, but .* is a real number; return a scalar",
        ),
        (lambda task, x: {"a": x.sum() * 1j}, r"returned 'a' as a value of type torch\.complex64"),
        (lambda task, x: {3: x.sum()}, r"returned a value under the name 3, but a name is a text"),
        (
            lambda task, x: {"a": 1} if 0 in x else {"b": 1},
            r"returned a for one batch, but it returned b for another, .* the same names for every batch",
        ),
        (
            lambda task, x: {"a": Own()},
            r"returned a new Own as 'a', but it knows nothing .*; make it once, in __init__",
        ),
        (
            _matrix,
            r"returned the metric MulticlassConfusionMatrix as 'matrix', but its compute\(\) gives a tensor of shape",
        ),
    ],
)
def test_mistakes_are_answered_with_the_method_and_the_mend(measure: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=r"metrics\(\) " + sentence):
        _run(Measuring(measure, matrix=MulticlassConfusionMatrix(3)))


class _Dicts(Task):
    """Writes no metrics of its own, and its batches are dicts."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (batch["inner"]["x"].float() ** 2).mean()


class _Samples:
    def __iter__(self) -> Iterator[Any]:
        return ({"scale": torch.tensor(1.0), "inner": {"x": i}} for i in range(7))


def test_a_task_without_metrics_reports_the_loss_of_dict_batches() -> None:
    validation = Validation(_Dicts(None), _Samples(), 3, World(alone(), torch.device("cpu")))
    *_, found = validation.run(nn.Linear(1, 1), nullcontext)
    assert found == {"loss": pytest.approx(sum(i**2 for i in range(7)) / 7)}
