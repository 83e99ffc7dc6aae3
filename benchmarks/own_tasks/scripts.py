"""Scripts with their own loop, as users write them, on 1, 2 and 3 workers of `stormo.World`.

Each is trained in float64 and its weights are compared with those of the same lines without stormo, in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.own_tasks.tasks import Outcome
from benchmarks.rank_pool import RankPool
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch.failure_reporter import FailureReporter
from stormo.script.world import World

SIZES = (1, 2, 3)
TOLERANCE = 1e-10
_NUM_SAMPLES = 46  # batches of 12, and one of 10, which three workers share unequally

Weights = dict[str, Tensor]


class Alone:
    """What a script calls where there is no stormo."""

    is_last_micro_batch = True

    def wrap(self, *parts: Any) -> Any:
        """The parts as they are."""
        return parts[0] if len(parts) == 1 else parts

    def loader(self, data: Any, **_: Any) -> Any:
        """The loader as it is: one process takes a batch in one pass."""
        return data

    def backward(self, loss: Tensor, **_: Any) -> None:
        """torch's own."""
        loss.backward()


def _data() -> TensorDataset:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(_NUM_SAMPLES, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(x, x[:, :2].cos() + x[:, 2:4])


def _loader() -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(5))


def _net(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers[:-1], nn.Linear(sizes[-2], sizes[-1]))


def _weights(*models: nn.Module) -> Weights:
    state = nn.ModuleList(models).state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), _net(2, 8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + (0.5 * log_variance).exp()).sigmoid(), mean, log_variance


def _autoencode(world: Any, **options: Any) -> Weights:
    model = _Autoencoder()
    model, optimizer = world.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(2):
        for x, _target in world.loader(_loader()):
            optimizer.zero_grad()
            made, mean, log_variance = model(x)
            loss = F.binary_cross_entropy(made, x.sigmoid(), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            world.backward(loss, **options)
            optimizer.step()
    return _weights(model)


def sum_undeclared(world: Any) -> Weights:
    """PyTorch's variational autoencoder with `world.backward(loss)`."""
    return _autoencode(world)


def sum_declared(world: Any) -> Weights:
    """The same with `reduction="sum"`."""
    return _autoencode(world, reduction="sum")


def average_of_weights(world: Any) -> Weights:
    """An exponential moving average of the weights, with two micro-batches a step."""
    model = _net(6, 16, 2)
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in world.loader(_loader(), accumulate=2):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        if world.is_last_micro_batch:
            average.update_parameters(model)
    return _weights(model, average)


def two_optimizers(world: Any) -> Weights:
    """A generator and a critic, each with an optimizer."""
    generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    critic = _net(2, 8, 1)
    generator, moves_generator = world.wrap(generator, torch.optim.SGD(generator.parameters(), lr=0.05))
    critic, moves_critic = world.wrap(critic, torch.optim.SGD(critic.parameters(), lr=0.05))
    for x, real in world.loader(_loader()):
        yes, no = x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        fake = generator(x[:, :2])
        critic.zero_grad()
        real_loss = F.binary_cross_entropy_with_logits(critic(real), yes)
        world.backward(real_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), no))
        moves_critic.step()
        generator.zero_grad()
        world.backward(F.binary_cross_entropy_with_logits(critic(fake), yes))
        moves_generator.step()
    return _weights(generator, critic)


def masked_mean(world: Any) -> Weights:
    """A mean over valid entries, of which every share has another number."""
    model = _net(6, 16, 2)
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in world.loader(_loader()):
        optimizer.zero_grad()
        mask = (y > 0).double()
        loss = ((model(x) - y).square() * mask).sum() / mask.sum()
        world.backward(loss, count=float(mask.sum()))
        optimizer.step()
    return _weights(model)


def own_schedule(world: Any) -> Weights:
    """A learning rate by a function of one's own, with two micro-batches a step."""
    model = _net(6, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.9**step)
    model, optimizer, schedule = world.wrap(model, optimizer, schedule)
    for _ in range(2):
        for x, y in world.loader(_loader(), accumulate=2):
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
    return _weights(model)


def frozen_backbone(world: Any) -> Weights:
    """A backbone that is not trained, in evaluation, and a head that is."""
    backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False).eval()
    model = nn.Sequential(backbone, nn.Linear(16, 2))
    head = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = world.wrap(model, torch.optim.SGD(head, lr=0.1))
    for x, y in world.loader(_loader()):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
    return _weights(model)


def tied_weights(world: Any) -> Weights:
    """One matrix at both ends."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, _target in world.loader(_loader()):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), x))
        optimizer.step()
    return _weights(model)


def unused_parameters(world: Any) -> Weights:
    """Heads that take turns, and one that is never used."""
    model = nn.ModuleDict({name: nn.Linear(6, 2) for name in ("even", "odd", "never")})
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number, (x, y) in enumerate(world.loader(_loader())):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model["odd" if number % 2 else "even"](x), y))
        optimizer.step()
    return _weights(model)


class _Readings(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (_data()[index] for index in range(_NUM_SAMPLES))


def stream(world: Any) -> Weights:
    """An iterable data set, which every worker reads whole."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in world.loader(DataLoader(_Readings(), batch_size=12)):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
    return _weights(model)


SCRIPTS: list[Callable[[Any], Weights]] = [
    sum_undeclared,
    sum_declared,
    average_of_weights,
    two_optimizers,
    masked_mean,
    own_schedule,
    frozen_backbone,
    tied_weights,
    unused_parameters,
    stream,
]


def _train(world: Any, script: Callable[[Any], Weights]) -> Weights:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        return script(world)
    finally:
        torch.set_default_dtype(before)


def train_with_stormo(workers: Workers, script: Callable[[Any], Weights]) -> Weights | str:
    """The weights that one worker ends with, or the sentence with which it is refused."""
    try:
        return _train(World._of(workers, FailureReporter()), script)
    except SettingError as error:
        return str(error)


def compare(
    run_ranks: Callable[..., list[Any]], script: Callable[[Any], Weights], sizes: tuple[int, ...] = SIZES
) -> Outcome:
    """What becomes of one script on some numbers of workers."""
    expected = _train(Alone(), script)
    largest, refusals, wrong = 0.0, [], []
    for size in sizes:
        for found in run_ranks(train_with_stormo, size, script):
            if isinstance(found, str):
                refusals.append(found)
                continue
            difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
            largest = max(largest, difference)
            if not difference <= TOLERANCE:
                wrong.append(f"{difference:.1e} on {size}")
    name = f"script: {script.__name__.replace('_', ' ')}"
    if wrong:
        return Outcome(name, "silent", "weights differ by " + ", ".join(dict.fromkeys(wrong)))
    if refusals:
        return Outcome(name, "refused", refusals[0])
    return Outcome(
        name, "equal", f"largest difference {largest:.1e} on {', '.join(str(size) for size in sizes)} workers"
    )


def run(folder: Path) -> list[Outcome]:
    """All scripts, on every number of workers; they leave nothing in the folder."""
    with RankPool() as pool:
        return [compare(pool.run, script) for script in SCRIPTS]
