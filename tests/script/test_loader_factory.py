"""What a script reads from a loader, and what all workers are told where a batch or the data does not do for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, default_collate

from stormo.data.sample_check import require_same_samples, require_same_start
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.script.world import World
from tests.script.loops import Ranks, Weights, data, make, plain_loop, weights, world_of


class Numbers(IterableDataset[Tensor]):
    """A stream of numbers; of each worker's own where a rank is given."""

    def __init__(self, num_samples: int = 12) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Any:
        return (torch.full((4,), float(number)) for number in range(self._num_samples))


def _read(loader: Any) -> tuple[Any, ...]:
    return loader.batch_size, loader.global_batch_size, loader.num_workers, loader.drop_last


def _join(samples: list[Any]) -> Any:
    return samples


def test_a_loader_shows_what_scripts_read_from_one_of_torch() -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    samples, stream = data(), Numbers()
    sampler = WeightedRandomSampler(torch.ones(38).tolist(), 30)
    own = DataLoader(samples, batch_size=8, sampler=sampler, drop_last=True, collate_fn=_join)
    loader: Any = world.loader(own, accumulate=3)
    assert _read(loader) == (3, 8, 0, True)
    assert (loader.dataset, loader.sampler, loader.batch_sampler) == (samples, sampler, own.batch_sampler)
    assert loader.collate_fn is _join
    batches = world.loader(DataLoader(samples, batch_sampler=[[0, 1], [2]]))
    assert (batches.batch_size, batches.batch_sampler) == (None, [[0, 1], [2]])
    plain = world.loader(samples, 5, accumulate=2, collate_fn=_join)
    assert _read(plain) == (5, 10, 0, False)
    assert (plain.dataset, plain.sampler, plain.collate_fn) == (samples, None, _join)
    assert _read(world.loader(stream, 5, accumulate=2)) == (5, 10, 0, False)
    assert _read(world.loader(DataLoader(stream, batch_size=None))) == (None, None, 0, False)
    assert _read(world.loader(stream, 5, sharded=True)) == (5, None, 0, False)
    numbers = range(7).__iter__
    source = type("Source", (), {"__iter__": lambda self: numbers()})()
    assert world.loader(source, 2).dataset is source


def _sizes(workers: Workers) -> list[int]:
    world = world_of(workers)
    loader = world.loader(DataLoader(data(16), batch_size=8))
    most = max(len(x) for x, _ in loader)
    assert loader.batch_size == most
    assert world.loader(data(), 5).batch_size == 5
    assert world.loader(data(), 5).global_batch_size == 15
    return [most]


def test_the_batch_size_is_that_of_this_workers_pass(run_ranks: Ranks) -> None:
    assert run_ranks(_sizes, 3) == [[2], [3], [3]]


def _too_small(world: World, model: Any) -> None:
    for x, y in world.loader(DataLoader(data(), batch_size=2)):
        world.backward(F.mse_loss(model(x), y))


def _too_small_and_last(world: World, model: Any) -> None:
    """The worker without a sample continues with something else."""
    for x, y in world.loader(DataLoader(data(), batch_sampler=[[0, 1]])):
        world.backward(F.mse_loss(model(x), y))
    world.sum(1)


def _no_stream(world: World, model: Any) -> None:
    for x in world.loader(Numbers(0 if world.rank == 1 else 4), 2, sharded=True):
        world.backward(model(x.double()).mean())


_SMALL = "a model in training mode was given a batch of 2 samples, but 3 workers × 1 micro-batch need at least 3"
REFUSED: dict[Callable[[World, Any], None], str] = {
    _too_small: _SMALL,
    _too_small_and_last: _SMALL,
    _no_stream: "world.loader(sharded=True) was given a stream that gives rank 1 no batch",
}


def _answers(workers: Workers) -> list[str]:
    """What each of the scripts is told, one after the other in the same processes: nothing is left waiting."""
    found = []
    for script in REFUSED:
        for has_norm in (False, True):
            world = world_of(workers)
            model, _ = world.wrap(*make(has_norm=has_norm))
            with pytest.raises(SettingError) as caught:
                script(world, model)
            found.append(str(caught.value))
    return found


def test_a_first_batch_that_is_too_small_is_refused_on_all_workers(run_ranks: Ranks) -> None:
    expected = [sentence for sentence in REFUSED.values() for _ in range(2)]
    for said in run_ranks(_answers, 3):
        assert [one[: len(start)] for one, start in zip(said, expected, strict=True)] == expected


def _small_validation(workers: Workers) -> int:
    world = world_of(workers)
    model, _ = world.wrap(*make())
    model.eval()
    with torch.no_grad():
        return world.sum(sum(len(model(x)) for x, _ in world.loader(DataLoader(data(5), batch_size=2))))


def test_a_validation_may_have_batches_as_small_as_it_likes(run_ranks: Ranks) -> None:
    assert run_ranks(_small_validation, 3) == [5, 5, 5]


class Items(Dataset[Any]):
    """Samples made by a function of the number."""

    def __init__(self, make_sample: Callable[[int], Any]) -> None:
        self._make = make_sample
        self.num_reads = 0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self._make(index)


def _compared(workers: Workers) -> list[tuple[str, int]]:
    """What is said of data sets that differ on rank 1, or seem to, and how often they are read."""
    rank = workers.rank
    own = torch.Generator().manual_seed(rank)  # a generator of the data set's own
    makers: list[Callable[[int], Any]] = [
        lambda n: (torch.arange(6.0) + n, {"label": n}),
        lambda n: torch.rand(6) + n,  # drawn, and the same where it is seeded
        lambda n: (torch.arange(6.0) + n) * (1 + 1e-7 * rank),  # another machine's last bits
        lambda n: torch.rand(6, generator=own),
        lambda n: f"file {n} of {rank}",
        lambda n: [][n],
        lambda n: (torch.arange(6.0), {"label": n if n < 8 else n + rank}),
        lambda n: torch.arange(6.0).roll(rank if n else 0),
        lambda n: torch.ones(6 + rank),
    ]
    found = []
    for make_sample in makers:
        items, before = Items(make_sample), torch.get_rng_state()
        try:
            require_same_samples(workers, items, may_read=True)
            said = ""
        except SettingError as error:
            said = str(error)
        assert torch.equal(before, torch.get_rng_state())
        found.append((said, items.num_reads))
    unread = Items(makers[-1])
    require_same_samples(workers, unread, may_read=rank == 0)  # the others' is read by processes
    return [*found, ("", unread.num_reads if rank else 0)]


def _started(workers: Workers) -> list[bool]:
    """Whether streams are refused that differ on rank 1, or draw."""
    own = torch.Generator().manual_seed(workers.rank)
    streams: list[tuple[Callable[[], Any], bool]] = [
        (lambda: {"x": torch.arange(6.0)}, True),
        (lambda: torch.rand(6, generator=own), True),  # other numbers each time: of its own, and meant
        (lambda: torch.arange(6.0) + workers.rank, True),
        (lambda: torch.arange(6.0) + workers.rank, False),  # cannot be read again
        (lambda: [f"line {workers.rank}"], True),
    ]
    found = []
    for read, is_twice in streams:
        try:
            require_same_start(workers, read(), read if is_twice else None)
            found.append(False)
        except SettingError:
            found.append(True)
    return found


def test_a_stream_that_starts_otherwise_on_one_worker_is_found(run_ranks: Ranks) -> None:
    assert run_ranks(_started, 2) == [[False, False, True, True, False]] * 2


def _start_again(workers: Workers) -> list[str]:
    def fail() -> Any:
        raise OSError("the stream is gone")

    said = []
    for batch, read_again in ((torch.arange(6.0) + workers.rank, fail), (torch.arange(6.0), fail), (None, fail)):
        try:
            require_same_start(workers, batch, read_again)
            said.append("")
        except OSError as error:
            said.append(str(error))
    return said


def test_an_error_of_the_second_reading_reaches_the_user(run_ranks: Ranks) -> None:
    assert run_ranks(_start_again, 2) == [["the stream is gone", "", ""]] * 2


def test_other_samples_on_one_worker_are_found_and_what_a_data_set_draws_is_not_taken_for_them(
    run_ranks: Ranks,
) -> None:
    first, second = run_ranks(_compared, 2)
    assert first == second
    assert [said.partition(" of the data set")[0].removeprefix("sample ") for said, _ in first] == [
        *[""] * 6,
        "8",
        "4",
        "0",
        "",
    ]
    assert first[-2][0] == (
        "sample 0 of the data set passed to world.loader() differs between rank 0 and rank 1, but each worker "
        "takes its share of one and the same data; let it not depend on the worker (sort the files it lists), "
        "or say sharded=True if every worker has its own part."
    )
    assert [num_reads for _, num_reads in first] == [3, 3, 3, 6, 3, 1, 6, 6, 6, 0]


def _through_a_loader(workers: Workers) -> str:
    world = world_of(workers)
    with pytest.raises(SettingError) as caught:
        world.loader(DataLoader(Items(lambda n: torch.tensor(n * (1.0 + workers.rank))), batch_size=3))
    return str(caught.value)


def test_a_loader_compares_the_samples(run_ranks: Ranks) -> None:
    assert all(
        said.startswith("sample 4 of the data set passed to world.loader() differs")
        for said in run_ranks(_through_a_loader, 2)
    )


class Doubled(DataLoader[Any]):
    """Changes every batch on its way to the loop."""

    def __iter__(self) -> Any:
        return ([2 * part for part in batch] for batch in super().__iter__())


def test_a_loader_that_changes_its_batches_is_refused_where_the_data_set_is_read_and_kept_where_it_is_read_itself() -> (
    None
):
    world = world_of(Workers(alone(), torch.device("cpu")))
    with pytest.raises(SettingError, match=r"^world.loader\(\) was given a Doubled, a DataLoader with its own"):
        world.loader(Doubled(data(), batch_size=8))
    (batch,) = world.loader(Doubled(data(4), batch_size=4), sharded=True)
    assert torch.equal(batch[0], 2 * data(4).tensors[0])


class Growing(Dataset[Any]):
    """Has more samples in every epoch."""

    def __init__(self) -> None:
        self.num_samples = 11

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)] * 4)


def _grown(workers: Workers, folder: str, save_at: tuple[int, int] | None) -> list[list[float]]:
    """The samples of this worker in each epoch; saves and ends behind a step, or before the first one of an epoch."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    samples = Growing()
    loader: Any = world.loader(samples, global_batch_size=4, shuffle=True)
    extra = world.load(folder)
    samples.num_samples = extra.get("num_samples", 11)
    seen: list[list[float]] = [[] for _ in range(3)]
    for epoch in range(extra.get("epoch", 0), 3):
        if save_at == (epoch, 0):
            world.save(folder, epoch=epoch, num_samples=samples.num_samples)
            return seen
        for number, x in enumerate(loader, 1):
            optimizer.zero_grad()
            world.backward(model(x).mean())
            optimizer.step()
            seen[epoch] += x[: loader.num_samples, 0].tolist()
            if save_at == (epoch, number):
                world.save(folder, epoch=epoch, num_samples=samples.num_samples)
                return seen
        samples.num_samples += 5
        assert len(loader) == -(-samples.num_samples // 4)
    samples.num_samples += workers.rank
    with pytest.raises(
        SettingError, match=r"^epoch 4 of loader 1 was to begin with 26 samples on rank 0, but the .* 27"
    ):
        next(iter(loader))
    return seen


@pytest.mark.parametrize("save_at", [(1, 2), (1, 0)])
def test_a_data_set_that_grows_is_read_whole_in_every_epoch_and_resumed(
    run_ranks: Ranks, tmp_path: Path, save_at: tuple[int, int]
) -> None:
    whole = run_ranks(_grown, 2, str(tmp_path / "whole"), None)
    assert [sorted(first + second) for first, second in zip(*whole, strict=True)] == [
        [float(index) for index in range(count)] for count in (11, 16, 21)
    ]
    before = run_ranks(_grown, 2, str(tmp_path / "cut"), save_at)
    after = run_ranks(_grown, 2, str(tmp_path / "cut"), None)
    for rank in range(2):
        assert [a + b for a, b in zip(before[rank], after[rank], strict=True)] == whole[rank]


def test_processes_that_read_see_what_a_data_set_has_grown_to() -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    samples = Growing()
    loader = world.loader(samples, global_batch_size=4, num_workers=1)
    for count in (11, 16):
        samples.num_samples = count
        assert [x for batch in loader for x in batch[:, 0].tolist()] == [float(index) for index in range(count)]


def _present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


class Torn(Dataset[Any]):
    """Some samples cannot be read and are None; the others are those of the data."""

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> Any:
        return None if index % 7 == 3 else data()[index]


def _thinned(workers: Workers) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    for x, y in world.loader(DataLoader(Torn(), batch_size=12, collate_fn=_present)):
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y), count=len(x))
        optimizer.step()
    return weights(model)


def test_a_loss_over_fewer_samples_than_were_read_says_over_how_many(run_ranks: Ranks) -> None:
    expected = plain_loop(*make(has_norm=False), DataLoader(Torn(), batch_size=12, collate_fn=_present), 1)
    for found in run_ranks(_thinned, 2):
        assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in expected.items())


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (lambda world: world.gather([object()]), "gathered"),
        (lambda world: world.share({"a": object()}), "shared"),
        (lambda world: world.save("never", a=object()), "saved"),
    ],
    ids=["gather", "share", "save"],
)
def test_a_value_that_cannot_travel_is_refused_by_what_was_to_be_done_with_it(
    call: Callable[[World], Any], done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SettingError, match=rf"^a object was to be {done} \(.*\), but .* of them can be {done}, and never"
    ):
        call(world_of(Workers(alone(), torch.device("cpu"))))
