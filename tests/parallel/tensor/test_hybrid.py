"""A replicated trunk and a sharded classifier: the same training as one process, whatever shares the workers have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.data.order import part
from stormo.distributed.parallel_dims import SubGroup
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.parallel.tensor.hybrid import Classifier, find_classifier, split_classifier
from stormo.tasks.task import NoOptions, Task
from stormo.tasks.wide_resnet import WideResNet

NUM_CLASSES, NUM_STEPS = 4, 10


class Asked(Task):
    """A task that names its classifier and a plan, or leaves them open."""

    def __init__(self, said: Callable[[Any], Any] = lambda model: None, plan: Any = None) -> None:
        super().__init__(NoOptions())
        self._said, self._plan = said, plan

    def classifier(self, model: nn.Module) -> Any:
        return self._said(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str] | None:
        return self._plan


def trunk() -> list[nn.Module]:
    return [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten()]


def connected(dropout: float = 0.0) -> list[nn.Module]:
    hidden = [nn.Linear(48, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 24), nn.Tanh(), nn.Dropout(dropout)]
    return [*hidden, nn.Linear(24, NUM_CLASSES)]


class Net(nn.Module):
    """With the classifier as a module of its own."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.trunk, self.classifier = nn.Sequential(*trunk()), classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.trunk(images))


class Head(nn.Module):
    """A classifier that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(48, 12), nn.Linear(12, 48), nn.LayerNorm(48)
        self.last = nn.Linear(48, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x + self.down(self.up(x).relu())))


MODELS: dict[str, tuple[Callable[[], nn.Module], Task]] = {
    "chain": (lambda: nn.Sequential(*trunk(), *connected()), Asked()),
    "module": (lambda: Net(nn.Sequential(*connected())), Asked()),
    "one layer": (lambda: Net(nn.Linear(48, NUM_CLASSES)), Asked()),
    "own": (
        lambda: Net(Head()),
        Asked(lambda model: model.classifier, {"classifier.up": "column", "classifier.down": "row"}),
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][0]()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(2)
    sizes = [7, 8, 2, 9, 1, 7, 5, 6, 7, 4]  # with three workers some have none
    return [
        (torch.randn(n, 1, 6, 6, generator=random), torch.randint(NUM_CLASSES, (n,), generator=random)) for n in sizes
    ]


def group_of(world: World) -> SubGroup:
    return SubGroup(range(world.size), world.rank, torch.distributed.group.WORLD)


def train_hybrid(world: World, name: str) -> tuple[float, dict[str, Tensor], list[str]]:
    """The largest difference from one process, the whole parameters, and the names of the sharded ones."""
    torch.set_default_dtype(torch.float64)
    plain, model, group = made(name), made(name), group_of(world)
    specs = split_classifier(MODELS[name][1], model, group)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    error = 0.0
    for images, classes in batches():
        start, stop = part(0, len(images), world.rank, world.size)
        is_stand_in = start == stop
        mine = slice(0, 1) if is_stand_in else slice(start, stop)
        weight = 0.0 if is_stand_in else (stop - start) / len(images)
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(plain(images), classes).backward()
        scores = model(images[mine])
        with torch.no_grad():
            error = max(error, float((scores - plain(images[mine])).abs().max()))
        (cross_entropy(scores, classes[mine]) * (weight * world.size)).backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name not in specs:
                group.sum(parameter.grad).div_(group.size)
        for optimizer in optimizers:
            optimizer.step()
    for (parameter_name, piece), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        spec = specs.get(parameter_name)
        expected = whole if spec is None else whole.narrow(spec.dim, spec.start, piece.shape[spec.dim])
        error = max(error, float((piece - expected).detach().abs().max()))
    with torch.no_grad():
        error = max(error, float((copy.deepcopy(model).eval()(images) - plain.eval()(images)).abs().max()))
    return error, {n: p.detach() for n, p in model.named_parameters() if n not in specs}, sorted(specs)


@pytest.mark.parametrize(
    ("name", "size", "sharded"),
    [
        ("chain", 3, ["3.bias", "3.weight", "6.weight", "9.weight"]),  # 4 classes are sharded by inputs
        ("module", 2, [f"classifier.{n}" for n in ("0.bias", "0.weight", "3.weight", "6.bias", "6.weight")]),
        ("one layer", 3, ["classifier.weight"]),
        ("own", 3, ["classifier.down.weight", "classifier.up.bias", "classifier.up.weight"]),
    ],
)
def test_hybrid_trains_as_one_process(run_ranks: Callable[..., Any], name: str, size: int, sharded: list[str]) -> None:
    answers = run_ranks(train_hybrid, size, name)
    assert max(error for error, _, _ in answers) < 1e-12
    assert all(specs == sharded for _, _, specs in answers)
    for _, whole, _ in answers[1:]:
        assert all(torch.equal(whole[key], value) for key, value in answers[0][1].items())


def pass_with_dropout(world: World) -> tuple[dict[str, Tensor], Tensor, Tensor, bool]:
    """Gradients of what is whole, masks of whole and of sharded activations in round 0, and whether all comes again."""
    torch.manual_seed(1)
    model = Net(nn.Sequential(*connected(dropout=0.5)))
    specs = split_classifier(Asked(), model, group_of(world))
    torch.manual_seed(10 + world.rank)  # every worker has its own samples, and draws for them
    seen: list[tuple[int, Tensor]] = []
    for number in (2, 5):
        model.classifier[number].register_forward_hook(
            lambda layer, inputs, output, number=number: seen.append((number, output.detach() == 0))
        )
    state = torch.get_rng_state()
    images = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(3 + world.rank))
    first = model(images)
    first.square().sum().backward()
    whole = {n: p.grad for n, p in model.classifier.named_parameters(prefix="classifier") if n not in specs}
    masks = dict(reversed(seen))  # of round 0, which is the first
    torch.set_rng_state(state)
    return whole, masks[5], masks[2], torch.equal(model(images), first)


def test_dropout_in_a_classifier(run_ranks: Callable[..., Any]) -> None:
    (grads, whole, sharded, again), (grads1, whole1, sharded1, again1) = run_ranks(pass_with_dropout, 2)
    assert list(grads) == ["classifier.3.bias"]
    assert torch.equal(grads["classifier.3.bias"], grads1["classifier.3.bias"])
    assert torch.equal(whole, whole1)
    assert whole.any()
    assert not torch.equal(sharded, sharded1)
    assert again
    assert again1


def test_the_classifier_is_the_connected_end() -> None:
    nested = nn.Sequential(*trunk(), nn.Sequential(nn.Linear(48, 12), nn.ReLU()), nn.Linear(12, 4))
    pair = {"3.0": "column", "4": "row"}
    assert find_classifier(Asked(), nested, 2) == Classifier("", 3, pair)
    inner = Net(nn.Sequential(nn.Dropout(), nn.Linear(48, 4)))
    assert find_classifier(Asked(), inner, 2) == Classifier("classifier", 1, {"classifier.1": "column-gathered"})
    assert find_classifier(Asked(lambda model: "classifier.1"), inner, 3) == Classifier(
        "classifier.1", None, {"classifier.1": "row-from-whole"}
    )
    normed = Net(nn.Sequential(nn.Linear(48, 12), nn.LayerNorm(12), nn.Linear(12, 4)))
    assert find_classifier(Asked(), normed, 2) == Classifier("classifier", 2, {"classifier.2": "column-gathered"})
    both = {"classifier.0": "column-gathered", "classifier.2": "column-gathered"}
    assert find_classifier(Asked(lambda model: model.classifier), normed, 2) == Classifier("classifier", 0, both)
    assert find_classifier(Asked(), WideResNet(width=0.25), 4) == Classifier("head", None, {"head": "row-from-whole"})


@pytest.mark.parametrize(
    ("task", "model", "words"),
    [
        (Asked(), nn.Sequential(*connected()), "all layers of Sequential are its classifier"),
        (Asked(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "does not end with a fully connected layer"),
        (Asked(lambda model: "head"), Net(Head()), "it is no module of Net; return one of its modules or that one's"),
        (Asked(lambda model: model.classifier), Net(Head()), "as in def tensor_plan(self, model): return"),
        (
            Asked(lambda model: model.classifier),
            Net(nn.Sequential(nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))),
            "classifier.1 keeps running_mean of its batches",
        ),
    ],
)
def test_refusals(task: Task, model: nn.Module, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        find_classifier(task, model, 2)
    assert words in str(caught.value)


def too_many(world: World) -> str:
    with pytest.raises(SettingError) as caught:
        split_classifier(Asked(), Net(nn.Sequential(nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 4))), group_of(world))
    return str(caught.value)


def test_widths_that_do_not_divide_are_refused(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(too_many, 2)[0] == (
        "--strategy hybrid was set with 2 workers, but classifier.0 has 5 outputs, which 2 do not divide; "
        "start 1 or 5 workers."
    )
