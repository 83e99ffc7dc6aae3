"""A loader's position in its data: a load resumes behind it whatever the batches and workers are, and loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.script.world import World
from tests.script.loops import Ranks, world_of

NUM_SAMPLES = 50
LENGTHS = (22, 5, 9)  # of the workers' own streams


def _alone() -> World:
    return world_of(Workers(alone(), torch.device("cpu")))


def _numbers(count: int = NUM_SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).view(-1, 1))


class _Count(IterableDataset[Tensor]):
    def __init__(self, start: int, stop: int) -> None:
        self._range = range(start, stop)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in self._range)


def _make_loader(world: World, kind: str, batch_size: int, accumulate: int) -> Any:
    if kind == "loader":
        return world.loader(DataLoader(_numbers(), batch_size=batch_size, shuffle=True), accumulate=accumulate)
    if kind == "set":
        return world.loader(_numbers(), batch_size, shuffle=True, accumulate=accumulate, seed=3)
    if kind == "stream":
        return world.loader(_Count(0, NUM_SAMPLES), batch_size, accumulate=accumulate)
    own = _Count(100 * world.rank, 100 * world.rank + LENGTHS[world.rank])
    return world.loader(own, batch_size, accumulate=accumulate, sharded=True)


def _train(workers: Workers, folder: str, kind: str, batch_size: int, accumulate: int, save_at: int) -> list[float]:
    """The samples of an epoch that this worker has trained on, or of the rest of one that was saved."""
    world = world_of(workers)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    world.wrap(model, optimizer)
    loader = _make_loader(world, kind, batch_size, accumulate)
    step = world.load(folder).get("step", 0)
    assert loader.num_behind == step * accumulate
    seen: list[float] = []
    for batch in loader:
        x = batch[0] if isinstance(batch, list) else batch
        optimizer.zero_grad()
        world.backward(model(x).square().mean())
        optimizer.step()
        seen += x[: loader.num_samples].flatten().tolist()
        step += not world._loop.is_accumulating
        if save_at and step == save_at:
            world.save(folder, step=step)
            break
    return seen


def _every(kind: str, size: int) -> list[float]:
    if kind != "sharded":
        return [float(number) for number in range(NUM_SAMPLES)]
    return [100.0 * rank + number for rank in range(size) for number in range(LENGTHS[rank])]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [  # workers, batch size of each, micro-batches
        ("set", (2, 4, 1), (3, 4, 1)),
        ("set", (2, 3, 2), (2, 5, 1)),
        ("loader", (2, 8, 1), (3, 12, 2)),
        ("stream", (2, 4, 1), (3, 4, 1)),
        ("stream", (2, 3, 2), (1, 20, 1)),
        ("sharded", (2, 4, 1), (2, 3, 1)),
        ("sharded", (2, 2, 2), (2, 4, 3)),
    ],
)
def test_other_workers_and_batches_resume_with_every_sample_that_is_left(
    run_ranks: Ranks, tmp_path: Path, kind: str, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    first = run_ranks(_train, before[0], str(tmp_path), kind, *before[1:], 2)
    rest = run_ranks(_train, after[0], str(tmp_path), kind, *after[1:], 0)
    assert len([number for seen in rest for number in seen]) > 0
    assert sorted(number for seen in first + rest for number in seen) == _every(kind, before[0])


def test_the_rest_of_a_batch_that_the_place_is_inside_of_is_given() -> None:
    loader = _alone().loader(DataLoader(_numbers(20), batch_size=8))
    loader.load_state(loader.state() | {"position": 5})
    assert [x.flatten().tolist() for (x,) in loader] == [[5.0, 6.0, 7.0], [*range(8, 16)], [*range(16, 20)]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iteration_that_was_made_before_a_save_gives_the_same_after_a_load(num_workers: int) -> None:
    def make(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        data = DataLoader(_numbers(), batch_size=20, shuffle=True, generator=generator, num_workers=num_workers)
        return _alone().loader(data)

    loader, other = make(1), make(2)
    batches = iter(loader)
    other.load_state(loader.state())
    for _ in range(2):
        assert [x.flatten().tolist() for (x,) in batches] == [x.flatten().tolist() for (x,) in other]
        batches = iter(loader)


def test_streams_go_on_after_the_shorter_one_has_ended(run_ranks: Ranks, tmp_path: Path) -> None:
    first = run_ranks(_train, 2, str(tmp_path), "sharded", 4, 1, 4)
    assert len(first[1]) == LENGTHS[1]
    assert run_ranks(_train, 2, str(tmp_path), "sharded", 4, 1, 0) == [[16.0, 17.0, 18.0, 19.0, 20.0, 21.0], []]


def _load_refused(workers: Workers, folder: str) -> str:
    with pytest.raises(SettingError) as caught:
        _train(workers, folder, "sharded", 4, 1, 0)
    return str(caught.value)


def test_other_streams_than_before_are_refused(run_ranks: Ranks, tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), "sharded", 4, 1, 2)
    for sentence in run_ranks(_load_refused, 3, str(tmp_path)):
        assert sentence.startswith("a checkpoint was loaded whose loader 1 was in 2 streams, but here it")
        assert "; start 2 workers, or " in sentence


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    loader = _alone().loader(_Count(0, 10), 4)
    loader.load_state(loader.state() | {"position": [12]})
    with pytest.raises(SettingError, match=r"is 12 samples into a stream, but the stream gives only 10;"):
        list(loader)


def test_a_stream_whose_processes_take_other_turns_is_refused() -> None:
    world = _alone()
    first, other = (world.loader(_Count(0, 10), size, num_workers=2) for size in (4, 3))
    other.load_state(first.state())  # at the start of an epoch there is no place to lose
    with pytest.raises(SettingError, match=r"read by 2 processes in batches of 4, but here it is read by 2 .* of 3,"):
        other.load_state(first.state() | {"position": [4]})


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class _EndlessWithLength(_Endless):
    def __len__(self) -> int:
        return 20


def test_a_sampler_that_never_ends_is_refused() -> None:
    world = _alone()
    with pytest.raises(TypeError, match="has no len"):
        next(iter(world.loader(DataLoader(_numbers(), batch_size=4, sampler=_Endless()))))
    loader = world.loader(DataLoader(_numbers(), batch_size=4, sampler=_EndlessWithLength()))
    with pytest.raises(SettingError, match=r"a len of 5 batches, but it gave more than 11 and did not end"):
        next(iter(loader))


def _validate(workers: Workers, kind: str) -> list[float]:
    world = world_of(workers)
    if kind == "single samples":
        loader: Any = world.loader(DataLoader(_numbers(11), batch_size=1))
    else:
        loader = world.loader(_Count(0, 11 if world.is_main else 0), 4, sharded=True)
    batches = [batch[0] if isinstance(batch, list) else batch for batch in loader]
    return [number for batch in batches for number in batch.flatten().tolist()]


@pytest.mark.parametrize("kind", ["single samples", "nothing for some"])
def test_a_validation_counts_every_sample_once_where_some_workers_have_none(run_ranks: Ranks, kind: str) -> None:
    seen = run_ranks(_validate, 3, kind)
    assert sorted(number for each in seen for number in each) == [float(number) for number in range(11)]


def _train_on_nothing(workers: Workers) -> str:
    world = world_of(workers)
    model = world.wrap(nn.Linear(1, 1))
    try:
        for x in world.loader(_Count(0, 0 if world.rank == 1 else 1), 4, sharded=True):
            world.backward(model(x).mean())
        world.sum(0.0)  # where the one without a batch hears of it
    except SettingError as error:
        return str(error)
    return ""


def test_a_training_with_nothing_for_one_worker_is_refused_on_all(run_ranks: Ranks) -> None:
    sentence = "world.loader(sharded=True) was given a stream that gives rank 1 no batch"
    assert [said.startswith(sentence) for said in run_ranks(_train_on_nothing, 2)] == [True, True]


class _WithNone(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.zeros(2, 1), None, torch.zeros(2, 1))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_batch_that_is_none_is_not_taken_for_the_end(sharded: bool) -> None:
    with pytest.raises(SettingError, match="a batch of type NoneType was given"):
        list(_alone().loader(DataLoader(_WithNone(), batch_size=None), sharded=sharded))


def _keep_on_one(workers: Workers, folder: str, keeps: int) -> str:
    world = world_of(workers)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    world.wrap(model, optimizer)
    loader = world.loader(DataLoader(_numbers(), batch_size=8))
    batches = iter(loader)
    kept: Any = batches if world.rank == keeps else None
    for number, (x,) in enumerate(batches):
        optimizer.zero_grad()
        world.backward(model(x).mean())
        optimizer.step()
        if number == 1:
            break
    del batches
    with pytest.raises(SettingError) as caught:
        world.save(folder)
    if kept is not None:
        kept.close()
    world.save(folder)
    return str(caught.value)


@pytest.mark.parametrize("keeps", [0, 1])
def test_an_iterator_that_one_worker_keeps_does_not_change_what_is_saved(
    run_ranks: Ranks, tmp_path: Path, keeps: int
) -> None:
    places = ["epoch 2, sample 0", "epoch 2, sample 0"]
    places[keeps] = "epoch 1, sample 16"
    for sentence in run_ranks(_keep_on_one, 2, str(tmp_path), keeps):
        assert sentence.startswith(
            f"world.save() was called with loader 1 at {places[0]} on rank 0, but it is at {places[1]} on rank 1"
        )


class _TimeMajor(IterableDataset[Any]):
    """Batches of four times by six samples, with one length for each sample."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(3):
            x = torch.arange(24.0).view(4, 6) + 100 * number
            yield {"x": x.unsqueeze(2), "lengths": x[0].long()}


def _columns(workers: Workers, folder: str, save_at: int) -> list[Any]:
    world = world_of(workers)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    world.wrap(model, optimizer)
    loader = world.loader(DataLoader(_TimeMajor(), batch_size=None), batch_dim=1)
    world.load(folder)
    seen: list[Any] = []
    for number, batch in enumerate(loader, 1):
        assert batch["x"].shape[:2] == (4, loader.num_samples)
        seen += zip(batch["lengths"].tolist(), batch["x"].squeeze(2).t().tolist(), strict=True)
        optimizer.zero_grad()
        world.backward(model(batch["x"]).square().mean())
        optimizer.step()
        if number == save_at:
            world.save(folder)
            break
    return seen


def test_a_time_major_stream_is_cut_along_its_samples(run_ranks: Ranks, tmp_path: Path) -> None:
    seen = run_ranks(_columns, 3, str(tmp_path), 1) + run_ranks(_columns, 2, str(tmp_path), 0)
    whole = [
        (int(x), [x + 6 * time for time in range(4)])
        for x in (float(100 * number + sample) for number in range(3) for sample in range(6))
    ]
    assert sorted(each for rank in seen for each in rank) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["random", "weighted", "in order"])
def test_loops_that_are_broken_off_draw_as_torch_does(kind: str, num_workers: int) -> None:
    def seen(through: Any) -> list[Any]:
        torch.manual_seed(1)
        draws = torch.Generator().manual_seed(4)
        sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, 30, generator=draws) if kind == "weighted" else None
        own = DataLoader(
            _numbers(),
            batch_size=8,
            shuffle=kind == "random",
            sampler=sampler,
            generator=draws,
            num_workers=num_workers,
            drop_last=True,
        )
        loader, found = through(own), []
        for stop_at in (2, 99, 1, 99):
            for number, (x,) in enumerate(loader, 1):
                found.append(x.flatten().tolist())
                if number == stop_at:
                    break
            found.append(draws.get_state().tolist())
        return found

    assert seen(lambda own: _alone().loader(own)) == seen(lambda own: own)


class _Batches(BatchSampler):
    """A user's own class, which changes nothing."""


@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_batches_after_a_break_are_those_of_torch(num_batches: int) -> None:
    def first_batches(world: World | None) -> list[list[float]]:
        sampler = RandomSampler(_numbers(8), generator=torch.Generator().manual_seed(1))
        own = DataLoader(_numbers(8), batch_sampler=_Batches(sampler, 2, drop_last=False))
        loader: Any = own if world is None else world.loader(own)
        given = []
        for _ in range(4):
            for number, (batch,) in enumerate(loader, 1):
                given.append(batch.flatten().tolist())
                if number == num_batches:
                    break
        return given

    torch.manual_seed(0)
    expected = first_batches(None)
    torch.manual_seed(0)
    assert first_batches(_alone()) == expected
