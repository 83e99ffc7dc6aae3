"""How a model becomes pieces and pieces become stages; what cannot be split is refused."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.parallel.pipeline.partition import balanced, check_pieces, into_stages, measured_costs
from stormo.parallel.pipeline.split_points import StageModule, find_pieces, keep_only
from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions
from stormo.tasks.language_model import LanguageModel, LanguageModelOptions
from tests.parallel.pipeline import models

CPU = torch.device("cpu")


def test_traced_model_gives_the_same_in_pieces() -> None:
    model, _ = models.make("skipping")
    args, kwargs, _ = models.inputs("skipping", 4)
    pieces = find_pieces(model, call=(args, kwargs))
    assert [piece.name for piece in pieces.items] == [
        *("layers.0", "layers.1", "layers.2", "layers.3", "table", "head"),
    ]
    check_pieces(model, pieces, (args, kwargs), CPU)
    assert torch.equal(StageModule(pieces.items)(*args, **kwargs), model(*args, **kwargs))
    # What was no tensor when it was traced is checked.
    with pytest.raises(AssertionError, match="bias has been specialized"):
        StageModule(pieces.items)(*args, **{**kwargs, "bias": 0.5})


class ModeDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 400)
        self.last = nn.Linear(400, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = F.dropout(self.first(x).abs() + 1, 0.5, self.training)
        return self.last(hidden) if mask is None else self.last(hidden) * mask


def test_trace_knows_training_from_validation() -> None:
    model = ModeDependent()
    first, last = find_pieces(model, call=((torch.ones(1, 8),), {})).items
    x = torch.ones(1, 8)
    model.train()
    assert bool((first.run(x)[0] == 0).any())
    model.eval()
    assert not bool((first.run(x)[0] == 0).any())
    assert torch.equal(last.run(first.run(x)), model(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(F.relu(self.shared(self.first(x)))))


def test_layers_that_share_a_weight_are_one_piece() -> None:
    names = [piece.name for piece in find_pieces(Shared()).items]
    assert names == ["first", "shared + shared", "last"]


class TiedEnds(nn.Sequential):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self[2].weight = self[0].weight


class TiedForward(TiedEnds):
    def forward(self, input: Tensor) -> Tensor:
        return self[2](self[1](self[0](input)))


def test_tied_weights_are_named() -> None:
    with pytest.raises(SettingError, match=r"0\.weight and 2\.weight are one parameter \(tied weights\)"):
        find_pieces(TiedEnds())
    pieces = find_pieces(TiedForward())
    assert len(pieces.items) == 1
    with pytest.raises(SettingError, match=r"0\.weight and 2\.weight are one parameter \(tied weights\).*--strategy"):
        into_stages(pieces, 2)
    with pytest.raises(SettingError) as caught:
        into_stages(find_pieces(Shared()), 4)
    assert "tied" not in str(caught.value)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


class Noisy(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(4)


class OtherOperations(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else torch.relu(x)


class Counting(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Branching, "control flow"),
        (Noisy, "does not come from its input"),
        (OtherOperations, "other operations in training"),
        (Counting, "changes calls without the input"),
    ],
)
def test_untraceable_model_is_refused_with_an_example(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(SettingError, match=rf"(?s){message}.*def pieces\(self, model\)"):
        find_pieces(kind())


def test_sequential_is_flattened() -> None:
    model, _ = models.make("sequential")
    pieces = find_pieces(model)
    assert [piece.name for piece in pieces.items] == ["0", "1", "2.0", "2.1", "2.2", "3", "4", "5", "6", "7"]
    check_pieces(model, pieces, (models.inputs("sequential", 4)[0], {}), CPU)


@pytest.mark.parametrize(
    ("task", "sample"),
    [
        (LanguageModel(LanguageModelOptions()), torch.zeros(2, 128, dtype=torch.long)),
        (FashionMnist(FashionMnistOptions(width=0.5)), torch.rand(2, 1, 28, 28)),
    ],
)
def test_pieces_of_the_built_in_tasks_are_the_model(task: Any, sample: Tensor) -> None:
    model = task.model()
    pieces = find_pieces(model, task.pieces(model), name=type(task).__name__)
    assert len(pieces.items) >= 7
    check_pieces(model, pieces, ((sample,), {}), CPU)


def wrong(model: Shared) -> dict[str, list[Any]]:
    first, shared, last = model.first, model.shared, model.last
    return {
        "the parameter last.weight is in none of them": [first, shared],
        "the parameter shared.weight is in two of them, 1 .shared. and 2 .shared.": [first, shared, shared, last],
        "the parameter first.weight is in two of them": [lambda x: model.first(x) + 0, first, shared, last],
        "it returned something of type int": [first, 3],
        "an empty list, or lists beside pieces": [[first], shared, last],
        "it returned nothing": [],
    }


def test_wrong_pieces_are_refused() -> None:
    model = Shared()
    for message, given in wrong(model).items():
        with pytest.raises(SettingError, match=message):
            find_pieces(model, given, name="MyTask")


def test_pieces_that_are_not_the_model_are_refused() -> None:
    model = Shared()
    pieces = find_pieces(model, [model.first, model.shared, model.last], name="MyTask")
    with pytest.raises(SettingError, match=r"they do not give what the model gives.*MyTask|MyTask.*they do not give"):
        check_pieces(model, pieces, ((torch.randn(2, 4),), {}), CPU)


def test_a_worker_keeps_its_own_parameters_under_their_names() -> None:
    model, given = models.make("gpt")
    wanted = [name for name, _ in model.named_parameters() if name.startswith(("blocks.1.", "blocks.2."))]
    pieces = find_pieces(model, given)
    stages = into_stages(pieces, 3)
    keep_only(model, stages[1], pieces)
    assert [name for name, _ in model.named_parameters()] == wanted
    assert list(StageModule(stages[1]).parameters()) == list(model.parameters())


def test_the_costliest_stage_is_as_cheap_as_possible() -> None:
    assert balanced([1, 1, 1, 1, 4, 1], 3) == [4, 5, 6]
    assert balanced([5, 1, 1, 1], 2) == [1, 4]
    assert balanced([1.0] * 8, 4) == [2, 4, 6, 8]  # of all with a stage of 2 or more the even one
    draw = random.Random(1)
    for _ in range(20):
        costs = [draw.randint(1, 9) for _ in range(7)]
        stops = balanced(costs, 3)
        found = max(sum(costs[start:stop]) for start, stop in zip([0, *stops], stops, strict=False))
        assert found == min(
            max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])) for a in range(1, 6) for b in range(a + 1, 7)
        )


def test_stages_are_the_task_s_own_where_it_has_grouped_them() -> None:
    model = Shared()
    first, shared, last = model.first, partial(F.relu), [model.shared, model.last]
    pieces = find_pieces(model, [[first, shared], last], name="MyTask")
    assert [len(stage) for stage in into_stages(pieces, 2)] == [2, 2]
    with pytest.raises(SettingError, match=r"3 stages was set, but MyTask.pieces\(model\) groups 4 pieces into 2"):
        into_stages(pieces, 3)
    with pytest.raises(SettingError, match=r"5 stages was set, but the model has 4 pieces"):
        into_stages(find_pieces(model, [first, shared, *last], name="MyTask"), 5)


def test_measuring_has_no_side_effects() -> None:
    model, _ = models.make("sequential")
    model.insert(1, nn.Dropout(0.5))
    pieces = find_pieces(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = measured_costs(pieces, (models.inputs("sequential", 4)[0], {}), CPU, repeats=1)
    assert len(costs) == len(pieces.items)
    assert all(cost > 0 for cost in costs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert sum(map(len, into_stages(pieces, 4, lambda: costs))) == len(pieces.items)
