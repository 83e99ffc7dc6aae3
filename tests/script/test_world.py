"""A user's own loop comes to the same weights on any number of workers as without stormo."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from benchmarks.command import relative_difference
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from tests.script.loops import Net, Ranks, Weights, data, make, plain_loop, weights, world_loop, world_of

SIZES = (1, 3)


def _require_same(found: list[Weights], expected: Weights, size: int) -> None:
    for each in found:
        assert relative_difference(each, expected) < 1e-12
        assert all(torch.equal(value, found[0][name]) for name, value in each.items())
    if size == 1:
        assert all(torch.equal(value, expected[name]) for name, value in found[0].items())


def _shuffled() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True)


def _dropped() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True, drop_last=True)


def _generator() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))


def _weighted() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, sampler=WeightedRandomSampler(torch.ones(38).tolist(), 30))


def _batches() -> DataLoader[Any]:
    return DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data(), replacement=True), 7, drop_last=False))


def _processes() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True, num_workers=1)


def _lasting_processes() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)


def _remainder_of_one() -> DataLoader[Any]:
    return DataLoader(data(33), batch_size=8, shuffle=True)  # the last batch is one sample, on up to three workers


LOADERS = (_shuffled, _dropped, _generator, _weighted, _batches, _remainder_of_one)


def _train(workers: Workers, make_loader: Callable[[], DataLoader[Any]], dropout: float, has_norm: bool) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(dropout, has_norm=has_norm))
    return world_loop(world, model, optimizer, world.loader(make_loader()))


@pytest.mark.parametrize(
    ("make_loader", "size"), [*((each, 3) for each in LOADERS), (_shuffled, 2), (_remainder_of_one, 1)]
)
def test_a_loaders_batches_are_shared_exactly(
    run_ranks: Ranks, make_loader: Callable[[], DataLoader[Any]], size: int
) -> None:
    # torch refuses one sample in batch norm; synchronised over workers it could not be compared with anything.
    has_norm = make_loader is not _remainder_of_one
    model, optimizer = make(has_norm=has_norm)
    expected = plain_loop(model, optimizer, make_loader())
    _require_same(run_ranks(_train, size, make_loader, 0.0, has_norm), expected, size)


def test_a_single_worker_draws_what_the_script_would_draw(run_ranks: Ranks) -> None:
    for make_loader in LOADERS[:-1]:
        expected = plain_loop(*make(0.5), make_loader())
        _require_same(run_ranks(_train, 1, make_loader, 0.5, True), expected, 1)


def test_processes_that_load_change_nothing() -> None:
    expected = plain_loop(*make(0.5), _shuffled())
    _require_same([_train_here(_processes, 0.5)], expected, 1)
    # Such a loader draws the seed of its processes once, and the order of the second epoch follows from that.
    lasting = plain_loop(*make(0.5), _lasting_processes())
    assert relative_difference(lasting, expected) > 1e-6
    _require_same([_train_here(_lasting_processes, 0.5)], lasting, 1)


def _train_here(make_loader: Callable[[], DataLoader[Any]], dropout: float) -> Weights:
    """In this process: those of the pool are daemons, which may not start others."""
    return _train(Workers(alone(), torch.device("cpu")), make_loader, dropout, True)


def _train_with_padding(workers: Workers, sync: bool) -> tuple[Weights, list[int]]:
    world = world_of(workers)
    model: nn.Module
    model, optimizer = make()
    if not sync:  # a worker's single sample needs several values for each channel
        model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten())
        model.append(nn.Linear(9, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.wrap(model, optimizer, sync_batch_norm=sync)
    loader = world.loader(DataLoader(data(34), batch_size=8))
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        seen.append(loader.num_samples)
    return weights(model), seen


def test_a_last_batch_smaller_than_the_workers_counts_each_sample_once(run_ranks: Ranks) -> None:
    expected = plain_loop(*make(), DataLoader(data(34), batch_size=8), 1)
    answers = run_ranks(_train_with_padding, 3, True)
    _require_same([found for found, _ in answers], expected, 3)
    assert [sum(counts) for counts in zip(*(seen for _, seen in answers), strict=True)] == [8, 8, 8, 8, 2]


def test_plain_batch_norm_is_the_same_on_all_workers_with_padding(run_ranks: Ranks) -> None:
    answers = run_ranks(_train_with_padding, 3, False)
    for found, _ in answers:
        values = {name: value for name, value in found.items() if value.is_floating_point()}
        assert all(torch.equal(value, answers[0][0][name]) for name, value in values.items())
        assert all(bool(value.isfinite().all()) for value in values.values())


def _train_set(workers: Workers, shuffle: bool, total: int | None) -> tuple[Weights, list[Tensor]]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    sizes: dict[str, Any] = {"global_batch_size": 12} if total else {"batch_size": 12 // world.size}
    loader = world.loader(data(), shuffle=shuffle, seed=4, **sizes)
    seen = [x for _ in range(2) for x, _ in loader]
    world_loop(world, model, optimizer, loader)
    return weights(model), seen


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_sets_order_does_not_depend_on_the_workers(run_ranks: Ranks, shuffle: bool) -> None:
    (alone, batches), *_ = run_ranks(_train_set, 1, shuffle, 12)
    every = torch.cat(batches)
    assert len(every) == 2 * 38
    assert len(every[:38].unique(dim=0)) == 38
    assert torch.equal(every[:38], every[38:]) != shuffle
    if not shuffle:
        model, optimizer = make()
        expected = plain_loop(model, optimizer, DataLoader(data(), batch_size=12))
        assert relative_difference(alone, expected) == 0
    for size in (2, 3):
        for total in (None, 12) if size == 3 else (12,):
            answers = run_ranks(_train_set, size, shuffle, total)
            _require_same([found for found, _ in answers], alone, size)
            shares = [torch.cat(parts) for parts in zip(*(seen for _, seen in answers), strict=False)]
            assert torch.equal(torch.cat(shares[:3]), every[:36])


def _train_accumulated(workers: Workers, accumulate: int) -> tuple[Weights, list[Any]]:
    world = world_of(workers)
    model, optimizer = make(has_norm=False)  # batch norm would see the micro-batch
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, scheduler = world.wrap(model, optimizer, scheduler)
    loader: Any = world.loader(DataLoader(data(), batch_size=12, shuffle=True), accumulate=accumulate)
    found = world_loop(world, model, optimizer, loader, scheduler=scheduler, max_norm=0.05)
    return found, [scheduler.last_epoch, optimizer.param_groups[0]["lr"], len(loader)]


@pytest.mark.parametrize("size", SIZES)
def test_micro_batches_make_one_step_for_optimizer_scheduler_and_clipping(run_ranks: Ranks, size: int) -> None:
    model, optimizer = make(has_norm=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data(), batch_size=12, shuffle=True)
    expected = plain_loop(model, optimizer, loader, scheduler=scheduler, max_norm=0.05)
    for accumulate in (1, 3):
        for found, facts in run_ranks(_train_accumulated, size, accumulate):
            assert facts == [8, optimizer.param_groups[0]["lr"], 4 * accumulate]
            assert relative_difference(found, expected) < 1e-12


def _schedule_later(workers: Workers) -> list[float]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # made after wrap, and not wrapped
    world_loop(world, model, optimizer, world.loader(DataLoader(data(), batch_size=12)), 1, scheduler=scheduler)
    return [optimizer.param_groups[0]["lr"], float(scheduler.last_epoch)]


def _schedule_wrapped_later(workers: Workers) -> list[float]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))  # the last micro-batches have one sample
    loader = world.loader(DataLoader(data(), batch_size=12), accumulate=2)
    scheduler = world.wrap(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * loader.num_steps))
    with pytest.raises(SettingError, match="for the second time"):
        world.wrap(scheduler)
    world_loop(world, model, optimizer, loader, 2, scheduler=scheduler)
    return [float(loader.num_steps), float(len(loader)), float(scheduler.last_epoch)]


def test_a_scheduler_wrapped_after_its_optimizer_waits_for_the_last_micro_batch(run_ranks: Ranks) -> None:
    assert run_ranks(_schedule_wrapped_later, 2) == [[4.0, 8.0, 8.0]] * 2


def test_a_scheduler_made_after_wrapping_steps_as_ever(run_ranks: Ranks) -> None:
    assert run_ranks(_schedule_later, 2) == [[0.1 / 16, 4.0]] * 2


def _accumulate_by_hand(workers: Workers | None, clears: bool) -> Weights:
    """Steps every third batch, as a script without stormo would, and may leave the gradients in."""
    model, optimizer = make()
    loader: Any = DataLoader(data(), batch_size=6, shuffle=True)
    world = None
    if workers is not None:
        world = world_of(workers)
        model, optimizer = world.wrap(model, optimizer)
        loader = world.loader(loader)
    for number, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y) / 3
        loss.backward() if world is None else world.backward(loss)
        if number % 3 == 2:
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(("size", "clears"), [(1, False), (3, True), (3, False)])
def test_a_script_that_accumulates_by_hand_stays_exact(run_ranks: Ranks, size: int, clears: bool) -> None:
    _require_same(run_ranks(_accumulate_by_hand, size, clears), _accumulate_by_hand(None, clears), size)


class _Sentences(Dataset[Any]):
    """Samples with unequally many tokens, the rest of which is padding."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(1, 7, (1,), generator=generator))
        tokens = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        return {"tokens": tokens, "mask": (torch.arange(6) < length).double(), "name": f"n{index}"}


def _token_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, float]:
    each = model(batch["tokens"].flatten(0, 1)).square().sum(1) * batch["mask"].flatten()
    count = batch["mask"].sum()
    return each.sum() / count, float(count)


def _train_tokens(workers: Workers | None, accumulate: int) -> Weights:
    model, optimizer = make(has_norm=False)
    loader: Any = DataLoader(_Sentences(), batch_size=9, shuffle=True)
    world = None
    if workers is not None:
        world = world_of(workers)
        model, optimizer = world.wrap(model, optimizer)
        loader = world.loader(loader, accumulate=accumulate)
    for _ in range(2):
        for batch in loader:
            assert len(batch["name"]) == len(batch["tokens"])
            optimizer.zero_grad()
            loss, count = _token_loss(model, batch)
            loss.backward() if world is None else world.backward(loss, count=count)
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_over_tokens_weighs_by_tokens(run_ranks: Ranks, size: int) -> None:
    expected = _train_tokens(None, 1)
    _require_same(run_ranks(_train_tokens, size, 1), expected, size)
    for found in run_ranks(_train_tokens, size, 3):
        assert relative_difference(found, expected) < 1e-12


class _Shard(IterableDataset[Any]):
    def __init__(self, rank: int, num_batches: int) -> None:
        self._rank, self._num_batches = rank, num_batches

    def __iter__(self) -> Iterator[Any]:
        x, y = data(200).tensors
        for number in range(4 * self._num_batches):
            row = 60 * self._rank + number
            yield x[row], y[row]


def _train_shards(workers: Workers, lengths: list[int], accumulate: int) -> tuple[Weights, int, list[int]]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    loader = world.loader(_Shard(world.rank, lengths[world.rank]), 4, sharded=True, accumulate=accumulate)
    num_seen, num_steps = 0, []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y))
            optimizer.step()
            num_seen += loader.num_samples
        num_steps.append(world._loop.num_steps)
    found = weights(model)
    num_validated = sum(len(x) for x, _ in loader)
    return found, num_seen, [*num_steps, world.sum(num_validated)]


@pytest.mark.parametrize("accumulate", [1, 5])
def test_every_batch_of_unequal_streams_counts(run_ranks: Ranks, accumulate: int) -> None:
    lengths = [10, 12]
    answers = run_ranks(_train_shards, 2, lengths, accumulate)
    assert [num_seen for _, num_seen, _ in answers] == [80, 96]
    steps_of_epoch = 12 if accumulate == 1 else 3
    assert [counts for _, _, counts in answers] == [[steps_of_epoch, 2 * steps_of_epoch, 88]] * 2
    # The same steps in one process.
    model, optimizer = make(has_norm=False)
    x, y = data(200).tensors
    for _ in range(2):
        for first in range(0, 12, accumulate):
            numbers = range(first, min(first + accumulate, 12))
            rows = [
                60 * rank + 4 * n + row for n in numbers for rank in (0, 1) if n < lengths[rank] for row in range(4)
            ]
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    _require_same([found for found, _, _ in answers], weights(model), 2)


class _Noisy(IterableDataset[Any]):
    """A stream whose samples are drawn as it is read."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(20):
            yield torch.randn(4), torch.randn(2)


def _train_stream(workers: Workers) -> tuple[Weights, Tensor]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(0.0))
    loader = world.loader(_Noisy(), global_batch_size=6)
    seen = torch.cat([x for x, _ in loader])
    return world_loop(world, model, optimizer, loader), seen


def test_a_stream_that_draws_gives_the_same_samples_to_any_number_of_workers(run_ranks: Ranks) -> None:
    ((alone, every),) = run_ranks(_train_stream, 1)
    assert len(every.unique(dim=0)) == 20
    for size in (2, 3):
        answers = run_ranks(_train_stream, size)
        _require_same([found for found, _ in answers], alone, size)
        seen = torch.cat([rows for _, rows in answers])
        assert len(seen) == 20
        assert torch.equal(seen.sort(0)[0], every.sort(0)[0])


class _Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)) + torch.randn(4), torch.randn(2)


def _train_augmented(workers: Workers) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    return world_loop(world, model, optimizer, world.loader(DataLoader(_Augmented(), batch_size=6, shuffle=True)))


def test_what_a_data_set_draws_does_not_depend_on_the_workers(run_ranks: Ranks) -> None:
    (alone,) = run_ranks(_train_augmented, 1)
    for size in (2, 3):
        _require_same(run_ranks(_train_augmented, size), alone, size)


def _gan(workers: Workers | None, together: bool) -> tuple[Weights, Weights]:
    generator, generator_optimizer = make(has_norm=False, lr=0.05)
    critic = nn.Linear(2, 1)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    loader: Any = DataLoader(data(), batch_size=8, shuffle=True)
    world = None
    if workers is not None:
        world = world_of(workers)
        if together:
            world.wrap(generator, critic, generator_optimizer, critic_optimizer)
        else:
            world.wrap(generator, generator_optimizer)
            world.wrap(critic, critic_optimizer)
        loader = world.loader(loader)
    backward = Tensor.backward if world is None else world.backward
    for number, (x, real) in enumerate(loader):
        fake = generator(x)
        critic.zero_grad()
        backward((critic(fake.detach()) - critic(real)).mean() + 0.1 * critic(real).square().mean())
        critic_optimizer.step()
        if number % 3 == 1:
            continue  # what the generator has of its last step stays, and is not exchanged again
        generator_optimizer.zero_grad()
        backward(-critic(fake).mean())
        generator_optimizer.step()
    return weights(generator), weights(critic)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_two_models_that_train_against_each_other_stay_exact(run_ranks: Ranks, size: int, together: bool) -> None:
    expected = _gan(None, together)
    answers = run_ranks(_gan, size, together)
    for index in (0, 1):
        _require_same([answer[index] for answer in answers], expected[index], size)


def _lbfgs(workers: Workers | None) -> Weights:
    model, _ = make(has_norm=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    loader: Any = DataLoader(data(), batch_size=20)
    world = None
    if workers is not None:
        world = world_of(workers)
        model, optimizer = world.wrap(model, optimizer)
        loader = world.loader(loader)
    for x, y in loader:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)  # noqa: B023
            loss.backward() if world is None else world.backward(loss)
            return loss

        optimizer.step(closure)
    return weights(model)


@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_with_a_closure_searches_with_the_loss_of_all(run_ranks: Ranks, size: int) -> None:
    found = run_ranks(_lbfgs, size)
    for each in found:
        assert relative_difference(each, _lbfgs(None)) < 1e-9
        assert all(torch.equal(value, found[0][name]) for name, value in each.items())


def _unfreeze(workers: Workers | None) -> Weights:
    model, optimizer = make()
    model.first.requires_grad_(False)
    loader: Any = DataLoader(data(), batch_size=8, shuffle=True)
    if workers is None:
        plain_loop(model, optimizer, loader, 1)
        model.first.requires_grad_(True)
        plain_loop(model, optimizer, loader, 1)
        return plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.05), loader, 1)
    world = world_of(workers)
    model, optimizer = world.wrap(model, optimizer)
    loader = world.loader(loader)
    world_loop(world, model, optimizer, loader, 1)
    model.first.requires_grad_(True)
    world_loop(world, model, optimizer, loader, 1)
    second = world.wrap(torch.optim.SGD(model.parameters(), lr=0.05))
    return world_loop(world, model, second, loader, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_part_of_a_model_can_be_unfrozen_and_moved_by_an_optimizer_made_then(run_ranks: Ranks, size: int) -> None:
    _require_same(run_ranks(_unfreeze, size), _unfreeze(None), size)


class _Scaler:
    """Scales the loss, and leaves out every third step, as one for half precision does after an overflow."""

    def __init__(self) -> None:
        self.num_calls = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_calls += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(8)
        if self.num_calls % 3:
            optimizer.step()

    def update(self) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}


def _scaled(workers: Workers | None, accumulate: int) -> tuple[Weights, int]:
    model, optimizer = make(has_norm=False)
    scaler = _Scaler()
    loader: Any = DataLoader(data(), batch_size=9, shuffle=True)
    world = None
    if workers is not None:
        world = world_of(workers)
        model, optimizer, scaler = world.wrap(model, optimizer, scaler)
        loader = world.loader(loader, accumulate=accumulate)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y) * 8
            loss.backward() if world is None else world.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model), scaler.num_calls


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_scaler_waits_for_the_last_micro_batch(run_ranks: Ranks, size: int) -> None:
    expected, num_calls = _scaled(None, 1)
    for accumulate in (1, 3):
        for found, calls in run_ranks(_scaled, size, accumulate):
            assert calls == num_calls
            assert relative_difference(found, expected) < 1e-12


def _validate(workers: Workers, num_samples: int, batch_size: int, after_training: bool) -> tuple[float, int, int]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    loader = world.loader(DataLoader(data(num_samples), batch_size=batch_size))
    if after_training:  # with this very loader
        world_loop(world, model, optimizer, loader, 1)
        model.load_state_dict(make()[0].state_dict())
    model.eval()
    loss: float = 0
    num_seen = 0
    with torch.no_grad():
        for x, y in loader:
            loss += F.mse_loss(model(x), y).item() * len(x)
            num_seen += len(x)
    return world.sum(loss), world.sum(num_seen), int(world.max(num_seen))


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "after_training"), [(1002, 50, True), (11, 3, False), (11, 3, True)]
)
def test_a_validation_counts_each_sample_once(
    run_ranks: Ranks, num_samples: int, batch_size: int, after_training: bool
) -> None:
    model, _ = make()
    x, y = data(num_samples).tensors
    expected = F.mse_loss(model.eval()(x), y).item() * num_samples
    for loss, num_seen, most in run_ranks(_validate, 3, num_samples, batch_size, after_training):
        assert num_seen == num_samples
        assert num_samples / 3 <= most <= num_samples / 3 + 21
        assert abs(loss - expected) < 1e-9 * expected


def _reduce(workers: Workers) -> list[Any]:
    world = world_of(workers)
    rank = world.rank
    x = torch.tensor([rank, 1.0], dtype=torch.float32)
    nested = world.sum({"b": [1, 0.5], "a": (x, True)})
    # A worker that had nothing to add still has the whole number it began with.
    mixed = world.sum(0 if rank == 0 else 0.25)
    most = world.max([rank, -rank, 0.5])
    shared = world.share((1, {2: x}) if rank == 0 else None)
    gathered = world.gather({"rank": rank, "x": torch.full((rank,), 1.0)})
    assert x.tolist() == [rank, 1.0]
    return [nested, mixed, most, world.any(rank == 1), shared, [len(each["x"]) for each in gathered]]


def test_values_of_all_forms_are_reduced(run_ranks: Ranks) -> None:
    for nested, mixed, most, anyone, shared, lengths in run_ranks(_reduce, 3):
        assert list(nested) == ["b", "a"]
        assert nested["b"] == [3, 1.5]
        assert isinstance(nested["b"][0], int)
        assert nested["a"][0].tolist() == [3.0, 3.0]
        assert nested["a"][0].dtype == torch.float32
        assert nested["a"][1] == 3
        assert (mixed, most, anyone, lengths) == (0.5, [2, 0, 0.5], True, [0, 1, 2])
        assert shared[0] == 1
        assert shared[1][2].tolist() == [0.0, 1.0]


def _means(workers: Workers) -> list[Any]:
    world = world_of(workers)
    rank = world.rank
    value = {"loss": float("nan") if rank == 0 else float(rank), "x": torch.tensor([rank, 4], dtype=torch.float32)}
    with pytest.raises(SettingError, match="add up to 0"):
        world.mean(1.0, count=0)
    return [world.mean(value, count=rank), world.mean(rank), world.mean(torch.tensor([rank]), count=2.0)]


def test_a_mean_weighs_by_what_each_worker_counts(run_ranks: Ranks) -> None:
    for weighted, plain, whole in run_ranks(_means, 3):
        assert weighted["loss"] == pytest.approx(5 / 3)  # that of rank 0 counts nothing
        assert weighted["x"].tolist() == pytest.approx([5 / 3, 4.0])
        assert weighted["x"].dtype == torch.float32
        assert (plain, whole.tolist()) == (1.0, [1.0])


def _averaged(workers: Workers | None, accumulate: int) -> Weights:
    """An average of the weights that moves once a step."""
    world = world_of(workers) if workers is not None else None
    model, optimizer = make(has_norm=False)
    if world is not None:
        world.wrap(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    plain = DataLoader(data(), batch_size=12)
    loader: Any = plain if world is None else world.loader(plain, accumulate=accumulate)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward() if world is None else world.backward(loss)
        optimizer.step()
        if world is None or world.is_last_micro_batch:
            average.update_parameters(model)
    if world is not None:
        with pytest.raises(SettingError, match="outside of a loop"):
            assert world.is_last_micro_batch
    return weights(average)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 3), (2, 1), (2, 2)])
def test_an_average_follows_the_last_micro_batch_of_a_step(run_ranks: Ranks, size: int, accumulate: int) -> None:
    _require_same(run_ranks(_averaged, size, accumulate), _averaged(None, 1), 3)


def _copies(workers: Workers) -> tuple[bool, bool]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    average = copy.deepcopy(model)
    stored = io.BytesIO()
    pickle.dump(model, stored)
    world_loop(world, model, optimizer, world.loader(DataLoader(data(), batch_size=8)), 1)
    average(data().tensors[0]).sum().backward()
    average.zero_grad()
    read = pickle.loads(stored.getvalue())
    read(data().tensors[0])
    return average.first.weight.grad is None, model.first.weight.grad is not None


def test_a_wrapped_model_can_be_copied_and_pickled(run_ranks: Ranks) -> None:
    assert run_ranks(_copies, 2) == [(True, True)] * 2


def _stored(model: nn.Module) -> tuple[set[str], bool]:
    """What a file of a whole model names, and whether it can be read as weights with the model's own classes."""
    stored = io.BytesIO()
    torch.save(model, stored)
    named = set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(stored.getvalue())))
    classes: list[Any] = [Net, nn.Linear, nn.BatchNorm1d, nn.Dropout, set]
    with torch.serialization.safe_globals(classes):
        read = torch.load(io.BytesIO(stored.getvalue()), weights_only=True)
    read.zero_grad()
    return named, all(torch.equal(value, model.state_dict()[name]) for name, value in read.state_dict().items())


def _stored_by_torch(workers: Workers) -> list[tuple[set[str], bool]]:
    world = world_of(workers)
    model, optimizer = make()
    before = _stored(model)
    world.wrap(model, optimizer)
    world_loop(world, model, optimizer, world.loader(DataLoader(data(), batch_size=8)), 1)
    stored = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], stored)
    torch.load(io.BytesIO(stored.getvalue()), weights_only=True)
    return [before, _stored(model)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_wrapped_model_is_stored_as_if_it_were_not(run_ranks: Ranks, size: int) -> None:
    for before, after in run_ranks(_stored_by_torch, size):
        assert after == before
        assert after[1]


def _split_later(workers: Workers) -> str:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    world_loop(world, model, optimizer, world.loader(DataLoader(data(), batch_size=8)), 1)
    part, _ = torch.utils.data.random_split(data(), [20, 18])
    with pytest.raises(SettingError) as caught:
        world.loader(DataLoader(part, batch_size=8))
    return str(caught.value)


def test_a_split_that_differs_between_workers_is_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_split_later, 2):
        assert sentence.startswith("the choice of samples is ")


def _largest(workers: Workers) -> tuple[float, Tensor, float, int]:
    world = world_of(workers)
    value = float("nan") if world.rank == 1 else 1.0
    return (
        world.max(value),
        world.max(torch.tensor([value, float(world.rank), -float("inf")])),
        world.sum(numpy.float32(0.5)),
        world.sum(numpy.int64(3)),
    )


def test_the_largest_of_values_with_a_nan_is_nan_and_numpy_s_numbers_are_numbers(run_ranks: Ranks) -> None:
    for largest, several, half, count in run_ranks(_largest, 2):
        assert math.isnan(largest)
        assert math.isnan(several[0])
        assert several[1:].tolist() == [1.0, -math.inf]
        assert (half, count) == (1.0, 6)


@pytest.mark.parametrize("numbers", [numpy.random.default_rng(0).permutation(38), torch.arange(38)])
def test_a_sampler_may_give_any_whole_numbers(numbers: Any) -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    found = torch.cat([x for x, _ in world.loader(DataLoader(data(), batch_size=8, sampler=numbers))])
    assert torch.equal(found, torch.cat([x for x, _ in DataLoader(data(), batch_size=8, sampler=numbers)]))


def _train_in_sixteen_bits(workers: Workers, compress: Any) -> tuple[Weights, str]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(), compress=compress)
    trained = world_loop(world, model, optimizer, world.loader(_shuffled()))
    with pytest.raises(SettingError) as refused:
        world.wrap(torch.optim.lr_scheduler.StepLR(optimizer, 1), compress="bf16")
    return trained, str(refused.value)


def test_gradients_that_travel_in_sixteen_bits_train_nearly_the_same(run_ranks: Ranks) -> None:
    expected = plain_loop(*make(), _shuffled())
    (lone,) = run_ranks(_train_in_sixteen_bits, 1, "bf16")
    assert all(torch.equal(value, expected[name]) for name, value in lone[0].items())  # which sends nothing
    for compress in ("bf16", "fp16"):
        results = run_ranks(_train_in_sixteen_bits, 2, compress)
        for found, sentence in results:
            assert 1e-6 < relative_difference(found, expected) < 1e-2
            assert all(torch.equal(value, results[0][0][name]) for name, value in found.items())
            assert sentence.startswith("world.wrap(…, compress='bf16') was called, but gradients are those of a model")


def _wrap_unlike(workers: Workers) -> str:
    world = world_of(workers)
    with pytest.raises(SettingError) as unknown:
        world.wrap(nn.Linear(2, 2), compress="powersgd")  # type: ignore[call-overload]
    assert "bf16 or fp16" in str(unknown.value)
    with pytest.raises(SettingError) as refused:
        world.wrap(nn.Linear(2, 2), compress="bf16" if workers.rank else "none")
    return str(refused.value)


def test_workers_that_would_send_gradients_in_other_bits_are_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_wrap_unlike, 2):
        assert "world.wrap(compress='bf16'," in sentence


def _wrap_lazy(workers: Workers) -> list[str]:
    found = []
    for layer in (nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)):
        with pytest.raises(SettingError) as refused:
            world_of(workers).wrap(nn.Sequential(layer))
        found.append(str(refused.value))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_lazy_layers_are_refused_before_their_first_call(run_ranks: Ranks, size: int) -> None:
    for parameter, buffer in run_ranks(_wrap_lazy, size):
        assert parameter.startswith("0.weight has no shape yet, but")
        assert buffer.startswith("0.running_mean has no shape yet, but")


def _twins(workers: Workers | None, first: str, compress: tuple[Any, Any]) -> Weights:
    """Two models of one size, wrapped by themselves; of some batches one worker has nothing, of others one model."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    twins = {name: nn.Linear(4, 4) for name in ("coder", "decoder", "idle")}
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins.values()]
    loader: Any = DataLoader(data(9), batch_size=4)
    world = None if workers is None else world_of(workers)
    if world is not None:
        names = sorted(twins, key=lambda name: name != first)
        for name, how in zip(names, (*compress, compress[0]), strict=True):
            world.wrap(twins[name], optimizers[list(twins).index(name)], compress=how)
        loader = world.loader(loader)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            coded = twins["coder"](x)
            if number == 1:  # a gradient of zeros, on the workers that have a sample
                coded = torch.where(x[:, :1] > 10, twins["idle"](x), coded)
            decoded = twins["decoder"](coded if epoch else x) + coded
            losses = [F.mse_loss(decoded[:, :2], y)]
            if number == 0:  # what one loss reaches alone, another pass of the same step does not
                losses = [F.mse_loss(twins["decoder"](x)[:, :2], y), F.mse_loss(twins["coder"](x)[:, 2:], y)]
            for loss in losses:
                if world is None:
                    loss.backward()
                else:
                    world.backward(loss, more=loss is not losses[-1])
            for optimizer in optimizers:
                if optimizer.param_groups[0]["params"][0].grad is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    return {f"{name}.{key}": value for name, twin in twins.items() for key, value in weights(twin).items()}


@pytest.mark.parametrize(("first", "size"), [("coder", 2), ("decoder", 3), ("idle", 3)])
def test_models_of_one_size_that_are_wrapped_by_themselves_keep_their_own_gradients(
    run_ranks: Ranks, first: str, size: int
) -> None:
    expected = _twins(None, first, ("none", "none"))
    for compress, tolerance in ((("none", "none"), 1e-12), (("bf16", "bf16"), 2e-2), (("fp16", "none"), 2e-3)):
        found = run_ranks(_twins, size, first, compress)
        for each in found:
            assert relative_difference(each, expected) < tolerance, compress
            assert all(torch.equal(value, found[0][name]) for name, value in each.items())


def _alone_in_batch_norm(workers: Workers) -> str:
    world = world_of(workers)
    model, _ = world.wrap(*make())

    def wait_in_vain(vector: Tensor) -> None:
        raise RuntimeError("[gloo] Timed out waiting 8000ms for recv operation to complete")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "sum", wait_in_vain)
        with pytest.raises(PeerFailedError) as failed:
            model(data().tensors[0])
    return str(failed.value)


def test_a_worker_that_waits_inside_of_a_model_says_at_which_line_and_the_way_out(run_ranks: Ranks) -> None:
    line = Net.forward.__code__.co_firstlineno + 1
    for rank, said in enumerate(run_ranks(_alone_in_batch_norm, 2)):
        place = f"a batch norm over all workers in loops.py line {line} (after model.eval() it waits for nobody)"
        assert said.startswith(f"rank {rank} is at: {place}; another rank has not come within 8 s.")
