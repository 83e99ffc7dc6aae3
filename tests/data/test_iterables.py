"""A stream is shared out sample by sample in its own order: no worker, process or resume changes what is trained on."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from stormo.data.batches import collate
from stormo.data.loaders import IterableLoader, Share, StreamedLoader
from stormo.data.order import part
from stormo.data.processes import open_loader, shut_down
from stormo.data.reading import RoundRobin, is_stream, known_length, unchanged
from stormo.errors import SettingError

# Loading processes are forked from a server: without this each would take seconds to import torch.
multiprocessing.set_forkserver_preload(["torch", "stormo.data.loaders"])

CPU = torch.device("cpu")
NUM_SAMPLES = 23


class Stream(IterableDataset[Tensor]):
    """Numbers, each with draws of three generators, after a shuffle at the start; it notes what is done with it."""

    def __init__(self, num_samples: int = NUM_SAMPLES, *, says: int | None = None, shuffles: bool = False) -> None:
        self.num_samples = num_samples
        self.says = num_samples if says is None else says
        self.shuffles = shuffles
        self.rounds: list[int] = []
        self.num_drawn = 0

    def __len__(self) -> int:
        return self.says

    def set_epoch(self, number: int) -> None:
        self.rounds.append(number)

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.num_samples).tolist() if self.shuffles else list(range(self.num_samples))
        return (self._sample(index) for index in order)

    def _sample(self, index: int) -> Tensor:
        self.num_drawn += 1
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class Endless(Stream):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]


class ByIndex(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return Stream()._sample(index)


class Plain:
    """Not torch's, and without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _share(worker: int = 0, num_workers: int = 1, *, batch: int = 8, accumulate: int = 1) -> Share:
    return Share(global_batch_size=batch, accumulate=accumulate, worker=worker, num_workers=num_workers)


def _add(data: Any, draws: Tensor) -> Any:
    return data + draws.sum(dim=1, keepdim=True)


def _loader(
    share: Share | None = None,
    data: Any = None,
    *,
    num_samples: int = NUM_SAMPLES,
    num_draws: int = 0,
    processes: int = 0,
    repeat: bool = False,
) -> IterableLoader:
    return IterableLoader(
        Stream() if data is None else data,
        num_samples,
        share or _share(),
        5,
        num_draws,
        _add,
        CPU,
        processes,
        repeat=repeat,
    )


def _numbers(loader: IterableLoader, epoch: int, position: int = 0) -> list[int]:
    return [int(row[0]) for batch in loader.epoch(epoch, position) for row in batch.data]


def _rows(loaders: list[IterableLoader], epoch: int) -> Tensor:
    """All samples of an epoch in the order of the stream, put together from the workers' shares."""
    batches = [batch for loader in loaders for batch in loader.epoch(epoch) if not batch.is_padding]
    return torch.cat([batch.data for batch in sorted(batches, key=lambda batch: batch.span.start)])


def test_a_stream_is_known_by_what_it_can_do() -> None:
    assert is_stream(Stream())
    assert is_stream(Plain())
    assert not is_stream(ByIndex())
    assert not is_stream([1, 2])
    assert (known_length(Stream()), known_length(Endless()), known_length(Plain())) == (NUM_SAMPLES, None, None)
    assert known_length([1, 2]) == 2
    with pytest.raises(TypeError):
        known_length(3)


@pytest.mark.parametrize("processes", [0, 1])
def test_the_order_is_the_stream_s_own_and_each_epoch_is_one_pass(processes: int) -> None:
    loader = _loader(processes=processes)
    try:
        for epoch in (1, 2):
            assert _numbers(loader, epoch) == list(range(NUM_SAMPLES))
        batches = list(loader.epoch(3))
        assert [batch.weight for batch in batches] == [1.0, 1.0, 1.0]
        assert [len(batch.data) for batch in batches] == [8, 8, 7]
        assert loader.samples(batches[-1].span).tolist() == list(range(16, 23))
    finally:
        loader.close()


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize(("num_workers", "accumulate"), [(1, 3), (2, 1), (3, 2), (5, 1), (3, 5)])
def test_samples_and_their_randomness_do_not_depend_on_the_number_of_workers(
    num_workers: int, accumulate: int, shuffles: bool
) -> None:
    def loader(share: Share) -> IterableLoader:
        return _loader(share, Stream(shuffles=shuffles), num_draws=2)

    for epoch in (1, 4):
        expected = _rows([loader(_share(batch=15))], epoch)
        shares = [_share(worker, num_workers, batch=15, accumulate=accumulate) for worker in range(num_workers)]
        assert torch.equal(_rows([loader(share) for share in shares], epoch), expected)
        assert sorted(expected[:, 0].long().tolist()) != expected[:, 0].long().tolist() or not shuffles
    assert len(set(expected[:, 1].tolist())) == NUM_SAMPLES


def test_a_sample_draws_what_it_would_draw_if_it_were_found_by_its_index() -> None:
    by_index = StreamedLoader(ByIndex(), _share(), 5, 0, _add, CPU, 0)
    order = torch.cat([batch.data for batch in by_index.epoch(2)])[:, 0].long().tolist()

    class InThatOrder(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            return (self._sample(index) for index in order)

    assert torch.equal(_rows([_loader(data=InThatOrder())], 2), torch.cat([batch.data for batch in by_index.epoch(2)]))


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("position", [0, 8, 16, 3])
@pytest.mark.parametrize("processes", [0, 1])
def test_an_epoch_repeat_from_any_position_with_the_same_samples(repeat: bool, position: int, processes: int) -> None:
    num_samples = 19 if repeat else NUM_SAMPLES
    how: dict[str, Any] = {"num_samples": num_samples, "repeat": repeat}
    whole = _loader(data=Stream(shuffles=True), **how)
    for epoch in (1, 2):
        list(whole.epoch(epoch))
    expected = torch.cat([batch.data for batch in whole.epoch(3)])[position:]
    resumed = _loader(data=Stream(shuffles=True), processes=processes, **how)
    try:
        list(resumed.first_and_last())  # as a worker does before it resumes
        assert torch.equal(torch.cat([batch.data for batch in resumed.epoch(3, position)]), expected)
    finally:
        resumed.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_without_a_length_continues_from_epoch_to_epoch_and_restarts_when_it_ends(processes: int) -> None:
    data = Endless()
    loader = _loader(data=data, num_samples=10, repeat=True, processes=processes)
    try:
        seen = [_numbers(loader, epoch) for epoch in (1, 2, 3, 4, 5)]
        assert list(itertools.chain(*seen)) == [i % NUM_SAMPLES for i in range(50)]
        span = next(iter(loader.epoch(3))).span
        assert loader.samples(span).tolist() == list(range(20, 28))
    finally:
        loader.close()
    if not processes:
        assert data.rounds == [0, 1, 2, 0, 1]  # twice more for the look at the third epoch
        assert data.num_drawn == 50 + 30


def test_a_pass_is_numbered_for_set_epoch() -> None:
    data = Stream()
    loader = _loader(data=data)
    list(loader.first_and_last())
    for epoch in (1, 2):
        list(loader.epoch(epoch))
    list(loader.epoch(7, 8))
    assert data.rounds == [0, 0, 1, 6]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_the_first_and_the_last_shape_come_from_the_beginning_of_the_stream(num_workers: int, accumulate: int) -> None:
    for worker, batch in itertools.product(range(num_workers), (15, 16, 20, 22, 23, 30)):
        data = Stream()
        loader = _loader(_share(worker, num_workers, batch=batch, accumulate=accumulate), data, num_draws=1)
        tried = list(loader.first_and_last())
        assert data.num_drawn <= batch
        every = [(len(one.data), one.span, one.is_padding) for one in loader.epoch(1)]
        shapes = {(length, is_padding) for length, _, is_padding in every}
        assert {(len(one.data), one.is_padding) for one in tried} == shapes
        assert [one.span for one in tried] == [span for _, span, _ in every]  # there are two steps at most


def test_an_empty_share_gets_the_first_sample_of_its_batch_with_weight_zero() -> None:
    # 23 = 2 × 10 + 3: the last batch leaves workers 0 and 2 of 5 empty-handed.
    last = [list(_loader(_share(worker, 5, batch=10)).epoch(1))[-1] for worker in range(5)]
    assert [batch.is_padding for batch in last] == [True, False, True, False, False]
    assert [batch.weight for batch in last] == [0.0, 1 / 3, 0.0, 1 / 3, 1 / 3]
    assert [int(batch.data[0, 0]) for batch in last] == [20, 20, 20, 21, 22]


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("true", "says", "why"),
    [(20, 23, "a stream of 23 samples .*, but it ended after 20"), (25, 23, "of 23 .*, but it went on with sample 24")],
)
def test_a_stream_that_is_not_as_long_as_it_says_is_refused_on_every_worker(
    worker: int, processes: int, true: int, says: int, why: str
) -> None:
    loader = _loader(_share(worker, 2), Stream(true, says=says), processes=processes)
    try:
        with pytest.raises(SettingError, match=why):
            list(loader.epoch(1))
    finally:
        loader.close()


def test_a_stream_that_gives_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match="round 2 over it gave no sample"):
        list(_loader(data=Endless(0), num_samples=4, repeat=True).epoch(1))


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_that_do_not_fit_together_are_answered_from_any_process(processes: int) -> None:
    loader = IterableLoader(_Ragged(), 4, _share(), 0, 0, _add, CPU, processes)
    by_index = StreamedLoader([[1], [1, 2]], _share(), 0, 0, _add, CPU, processes)  # type: ignore[arg-type]
    for one in (loader, by_index):
        try:
            with pytest.raises(SettingError, match=r"^the data set gave samples .* write collate\(self, samples\)"):
                list(one.epoch(1))
        finally:
            one.close()


class _Ragged:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1], [1, 2], [1], [1]])


@pytest.mark.parametrize("processes", [0, 1])
def test_the_global_generators_are_untouched(processes: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    loader = _loader(data=Stream(shuffles=True), processes=processes)
    list(loader.epoch(1))
    list(RoundRobin(Stream(shuffles=True), 4, 0, 1, collate))
    loader.close()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("num_samples", [0, 3, 8, 23])
def test_workers_take_the_batches_of_a_stream_in_turn_and_all_see_its_end(num_samples: int, processes: int) -> None:
    data = Endless(num_samples, shuffles=True)
    loader = open_loader(RoundRobin(data, 4, 0, 1, collate), CPU, processes, unchanged, batch_size=None)
    alone = list(loader)
    shut_down(loader)
    assert sum(length for length, _ in alone) == num_samples
    for worker in range(3):
        found = list(RoundRobin(data, 4, worker, 3, collate))
        assert [length for length, _ in found] == [length for length, _ in alone]
        for index, (_, batch) in enumerate(found):
            if index % 3 == worker or index == 0:
                assert torch.equal(batch, alone[index][1])
            else:
                assert batch is None


def test_shares_are_those_of_the_order() -> None:
    for worker in range(3):
        first = next(iter(_loader(_share(worker, 3)).epoch(1)))
        assert first.data[:, 0].long().tolist() == list(range(*part(0, 8, worker, 3)))
