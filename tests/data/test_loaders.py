"""Both loaders give the same batches, whatever the number of workers, from any position."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, Subset, TensorDataset

from stormo.data import loaders
from stormo.data.batches import collate, move, tensors_in
from stormo.data.loaders import Batch, Loader, ResidentLoader, Share, StreamedLoader
from stormo.data.order import epoch_draws, epoch_order
from stormo.data.processes import DevicePrefetcher
from stormo.data.tensors import TensorData, in_tensors

# Loading processes are forked from a server: without this each would take seconds to import torch.
multiprocessing.set_forkserver_preload(["torch", "stormo.data.loaders"])

CPU = torch.device("cpu")
NUM_SAMPLES = 23


def _data() -> TensorData:
    return TensorData(torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) * 10.0)


class Noisy(Dataset[Tensor]):
    """A data set with randomness of its own, and the process that made each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(())), float(os.getpid())], dtype=torch.float64)


def _add_draws(data: Any, draws: Tensor) -> Any:
    samples, values = data
    return samples, values + draws.sum(dim=1)


def _share(worker: int = 0, num_workers: int = 1, *, batch: int = 8, accumulate: int = 1) -> Share:
    return Share(global_batch_size=batch, accumulate=accumulate, worker=worker, num_workers=num_workers)


def _resident(share: Share, *, num_draws: int = 0) -> ResidentLoader:
    return ResidentLoader(_data(), share, 5, num_draws, _add_draws, CPU)


def _streamed(
    share: Share, data: Dataset[Any] | None = None, *, num_draws: int = 0, processes: int = 0
) -> StreamedLoader:
    return StreamedLoader(data or _data(), share, 5, num_draws, _add_draws, CPU, processes)


def _same(first: Iterator[Batch], second: Iterator[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(
        one.span == other.span
        and one.is_padding == other.is_padding
        and all(torch.equal(a, b) for a, b in zip(tensors_in(one.data), tensors_in(other.data), strict=True))
        for one, other in pairs
    )


def _rows(workers: list[Loader], epoch: int) -> dict[int, list[Tensor]]:
    """The samples of each global batch in their order, by its first position."""
    rows: dict[int, list[Tensor]] = {}
    batches = [batch for loader in workers for batch in loader.epoch(epoch) if not batch.is_padding]
    for batch in sorted(batches, key=lambda batch: batch.span.start):
        rows.setdefault(batch.span.step_start, []).append(torch.stack([t.double() for t in batch.data], dim=1))
    return rows


@pytest.mark.parametrize("processes", [0, 2])
def test_resident_and_streamed_give_the_same_batches_epoch_after_epoch(processes: int) -> None:
    share = _share(1, 3, accumulate=2)
    streamed = _streamed(share, num_draws=2, processes=processes)
    resident = _resident(share, num_draws=2)
    try:
        for epoch, position in ((1, 0), (2, 8), (3, 0)):
            assert _same(resident.epoch(epoch, position), streamed.epoch(epoch, position))
    finally:
        streamed.close()


@pytest.mark.parametrize("make", [_resident, _streamed])
def test_a_batch_holds_the_samples_of_the_order(make: Any) -> None:
    loader = make(_share())
    order = epoch_order(NUM_SAMPLES, 5, 2)
    for batch in loader.epoch(2):
        expected = order[batch.span.start : batch.span.stop]
        assert torch.equal(batch.data[0], expected)
        assert torch.equal(batch.data[1], expected * 10.0)
        assert torch.equal(loader.samples(batch.span), order[batch.span.step_start : batch.span.step_stop])


@pytest.mark.parametrize("make", [_resident, _streamed])
@pytest.mark.parametrize("position", [0, 8, 16, 3, 23])
def test_an_epoch_resumes_from_any_position(make: Any, position: int) -> None:
    seen = [int(sample) for batch in make(_share()).epoch(1, position) for sample in batch.data[0]]
    assert seen == epoch_order(NUM_SAMPLES, 5, 1)[position:].tolist()


@pytest.mark.parametrize("make", [_resident, _streamed])
@pytest.mark.parametrize(("num_workers", "accumulate"), [(1, 3), (2, 1), (3, 2), (5, 1)])
def test_samples_draws_and_augmentation_do_not_depend_on_the_number_of_workers(
    make: Any, num_workers: int, accumulate: int
) -> None:
    alone = _rows([make(_share(), num_draws=3)], 4)
    shares = [_share(worker, num_workers, accumulate=accumulate) for worker in range(num_workers)]
    together = _rows([make(share, num_draws=3) for share in shares], 4)
    assert alone.keys() == together.keys()
    for start, rows in alone.items():
        assert torch.equal(torch.cat(rows), torch.cat(together[start]))


def test_the_draws_are_those_of_the_positions() -> None:
    draws = epoch_draws(NUM_SAMPLES, 2, 5, 1)
    order = epoch_order(NUM_SAMPLES, 5, 1)
    for batch in _resident(_share(1, 2), num_draws=2).epoch(1):
        at = slice(batch.span.start, batch.span.stop)
        assert torch.equal(batch.data[1], order[at] * 10.0 + draws[at].sum(dim=1))


@pytest.mark.parametrize("make", [_resident, _streamed])
def test_an_empty_share_gets_padding_of_weight_zero(make: Any) -> None:
    # 23 = 2 × 10 + 3: the last batch leaves workers 0 and 2 of 5 empty-handed.
    last = [list(make(_share(worker, 5, batch=10), num_draws=1).epoch(1))[-1] for worker in range(5)]
    assert [batch.is_padding for batch in last] == [True, False, True, False, False]
    assert [batch.weight for batch in last] == [0.0, 1 / 3, 0.0, 1 / 3, 1 / 3]
    order = epoch_order(NUM_SAMPLES, 5, 1)
    for batch in last:
        assert len(batch.data[0]) == 1
    assert last[0].data[0].tolist() == order[20:21].tolist()  # from the same global batch


@pytest.mark.parametrize("make", [_resident, _streamed])
def test_the_weights_of_a_global_batch_add_up_to_one(make: Any) -> None:
    totals: dict[int, float] = {}
    for worker in range(3):
        for batch in make(_share(worker, 3, batch=7, accumulate=2)).epoch(1):
            totals[batch.span.step_start] = totals.get(batch.span.step_start, 0.0) + batch.weight
    assert all(total == pytest.approx(1.0) for total in totals.values())


@pytest.mark.parametrize("make", [_resident, _streamed])
def test_first_and_last_hold_every_shape_that_will_come(make: Any) -> None:
    loader = make(_share(1, 2, accumulate=2))
    shapes = {len(batch.data[0]) for batch in loader.epoch(1)}
    tried = list(loader.first_and_last())
    assert {len(batch.data[0]) for batch in tried} == shapes
    assert len(tried) == 4  # the micro-batches of the first step and of the last
    assert tried[-1].span.step_stop == NUM_SAMPLES
    one_batch = make(_share(batch=100))
    assert len(list(one_batch.first_and_last())) == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_randomness_of_a_data_set_depends_on_the_position_alone(processes: int) -> None:
    expected: dict[int, float] = {}
    for batch in _streamed(_share(), Noisy()).epoch(1):
        expected |= {int(row[0]): float(row[1]) for row in batch.data}
    assert len(set(expected.values())) == NUM_SAMPLES  # each sample draws numbers of its own
    pids: set[int] = set()
    for worker in range(2):
        loader = _streamed(_share(worker, 2, accumulate=2), Noisy(), processes=processes)
        try:
            for batch in loader.epoch(1):
                pids |= {int(pid) for pid in batch.data[:, 2]}
                if not batch.is_padding:
                    assert all(expected[int(row[0])] == float(row[1]) for row in batch.data)
            other_epoch = torch.cat([batch.data for batch in loader.epoch(2)])
            assert any(expected[int(row[0])] != float(row[1]) for row in other_epoch)
        finally:
            loader.close()
    if processes:
        assert os.getpid() not in pids
        assert len(pids) == 4  # two processes for each of the two loaders


@pytest.mark.parametrize("processes", [0, 1])
def test_the_global_generator_is_untouched(processes: int) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = _streamed(_share(), Noisy(), processes=processes)
    list(loader.epoch(1))
    list(loader.epoch(2))
    list(loader.first_and_last())
    loader.close()
    list(_resident(_share(), num_draws=2).epoch(1))
    assert torch.equal(before, torch.get_rng_state())


def test_time_spent_waiting_is_counted_and_time_spent_computing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Slow(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            nonlocal now_s
            now_s += 0.5
            return torch.tensor(index)

    monkeypatch.setattr(loaders, "time", SimpleNamespace(perf_counter=lambda: now_s))
    loader = StreamedLoader(Slow(), _share(batch=2), 0, 0, _add_draws, CPU, 0)
    for num_done, _ in enumerate(loader.epoch(1), start=1):
        now_s += 100.0  # the model computes
        # The first sample is read twice, to see whether it depends on the seed.
        assert loader.wait_s == 2.5, f"batch {num_done}: both batches were read before the first was handed out"
    loader.wait_s = 0.0
    list(loader.epoch(2))
    assert loader.wait_s == 2.0


@pytest.mark.parametrize(("device", "seconds_a_read"), [("cpu", 1.0), pytest.param("cuda", 0.0, marks=pytest.mark.gpu)])
def test_a_read_that_is_queued_on_the_gpu_is_no_wait(
    monkeypatch: pytest.MonkeyPatch, device: str, seconds_a_read: float
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(loaders, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    loader = ResidentLoader(_data(), _share(), 5, 0, _add_draws, torch.device(device))
    num_reads = len(list(loader.epoch(1))) + 1  # the last one finds the end
    assert loader.wait_s == num_reads * seconds_a_read


def test_close_leaves_no_process_even_in_the_middle_of_an_epoch() -> None:
    before = set(multiprocessing.active_children())
    loader = _streamed(_share(batch=2), Noisy(), processes=2)
    batches = loader.epoch(1)
    pids = {int(pid) for pid in next(batches).data[:, 2]} | {int(pid) for pid in next(batches).data[:, 2]}
    assert len(pids) == 2
    assert all(_is_running(pid) for pid in pids)
    loader.close()
    assert set(multiprocessing.active_children()) == before
    assert not any(_is_running(pid) for pid in pids)
    loader.close()  # harmless when repeated


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _Pair(NamedTuple):
    left: Tensor
    right: Any


def test_moving_keeps_the_shape_of_nested_data() -> None:
    data = {"a": torch.zeros(2), "b": [torch.ones(1), "text"], "c": _Pair(torch.ones(3), (torch.zeros(1), 4))}
    moved = move(data, CPU)
    assert moved["b"][1] == "text"
    assert isinstance(moved["c"], _Pair)
    assert isinstance(moved["c"].right, tuple)
    assert moved["c"].right[1] == 4
    assert len(list(tensors_in(moved))) == 4


def test_tensors_of_unequal_lengths_are_no_data_set() -> None:
    with pytest.raises(ValueError, match=r"given tensors of 2, 3 rows, but .* give it tensors of one length\."):
        TensorData(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="given no tensors"):
        TensorData()
    data = TensorData(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    assert (len(data), data.num_bytes) == (3, 3 * 2 * 4 + 3 * 8)


def test_data_sets_of_torch_that_are_held_in_tensors_are_taken_as_such() -> None:
    whole = TensorDataset(torch.arange(6), torch.arange(6) * 10)
    split = in_tensors(Subset(whole, [4, 1]))
    assert isinstance(split, TensorData)
    assert split[0] == (4, 40)
    assert len(split) == 2
    assert in_tensors(whole)[5] == (5, 50)

    class Noisy(TensorDataset):
        """Does more than hold tensors."""

    noisy = Noisy(torch.arange(6))
    assert in_tensors(noisy) is noisy
    outer = Subset(noisy, [1])
    assert in_tensors(outer) is outer


class _OnGpu(Tensor):
    """Says that it is on a GPU, and takes note of the streams that use it."""

    streams: list[Any]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_only_what_is_on_the_gpu_is_kept_for_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])  # moves itself; its batch sizes stay on the host
    moved = torch.ones(3).as_subclass(_OnGpu)
    moved.streams = []
    waited: list[Any] = []
    current = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    prefetcher = DevicePrefetcher(TensorDataset(torch.ones(1)), torch.device("cpu"), 0, collate)
    batch = packed._replace(data=moved)
    assert not batch.batch_sizes.is_cuda
    assert prefetcher._usable(batch, "copied") is batch
    assert (waited, moved.streams) == (["copied"], [current])
