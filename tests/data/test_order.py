"""The global sample order: pure, whole, and blind to the number of workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.data.order import MicroBatch, derive_seed, epoch_draws, epoch_order, micro_batches, part
from stormo.distributed.world import World


def seed_elsewhere(_: World) -> int:
    return derive_seed(0, "order", 1)


def test_seeds_depend_on_every_part_and_on_nothing_else(run_ranks: Callable[..., list[Any]]) -> None:
    seeds = {derive_seed(*parts) for parts in [(0,), (1,), (0, "a"), (0, "b"), ("0a",), (0, "a", 1), ("a", 0)]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    # The same on every machine and in every process, whatever PYTHONHASHSEED is.
    assert derive_seed(0, "order", 1) == derive_seed("0", "order", "1")
    assert run_ranks(seed_elsewhere, 1) == [derive_seed(0, "order", 1)]


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    first, second = epoch_order(1001, 7, 1), epoch_order(1001, 7, 2)
    draws = torch.Generator().manual_seed(derive_seed(7, "order", 1))
    assert first.dtype == torch.int32  # half of the memory, and the same permutation
    assert torch.equal(first.long(), torch.randperm(1001, generator=draws))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1001))
    assert not torch.equal(first, second)
    assert not torch.equal(first, epoch_order(1001, 8, 1))
    assert torch.equal(first, epoch_order(1001, 7, 1))


def test_order_and_draws_neither_read_nor_move_the_global_generator() -> None:
    torch.manual_seed(1)
    first = epoch_order(50, 0, 1), epoch_draws(50, 3, 0, 1)
    after_first = torch.get_rng_state()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first[0], epoch_order(50, 0, 1))
    assert torch.equal(first[1], epoch_draws(50, 3, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(after_first, torch.get_rng_state())


def test_draws_are_numbers_in_0_to_1_of_their_own_for_each_position() -> None:
    draws = epoch_draws(1000, 3, 0, 1)
    assert (draws.shape, draws.dtype) == ((1000, 3), torch.float32)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert len(draws[:, 0].unique()) > 990
    assert not torch.equal(draws, epoch_draws(1000, 3, 0, 2))
    assert not torch.equal(draws, epoch_draws(1000, 3, 1, 1))


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 5000), st.integers(1, 300))
def test_parts_cut_a_stretch_without_gap_or_overlap_and_differ_by_one_at_most(
    start: int, length: int, num_parts: int
) -> None:
    pieces = [part(start, start + length, index, num_parts) for index in range(num_parts)]
    assert pieces[0][0] == start
    assert pieces[-1][1] == start + length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    sizes = [stop - begin for begin, stop in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


_shapes = {
    "num_samples": st.integers(1, 400),
    "global_batch_size": st.integers(1, 120),
    "accumulate": st.integers(1, 5),
    "num_workers": st.integers(1, 9),
}


@settings(max_examples=100)
@given(st.data(), st.fixed_dictionaries(_shapes))
def test_all_micro_batches_of_all_workers_cover_each_position_once(data: st.DataObject, shape: dict[str, int]) -> None:
    position = data.draw(st.integers(0, shape["num_samples"]))
    num_workers = shape["num_workers"]
    arguments = shape["num_samples"], shape["global_batch_size"], shape["accumulate"]
    lists = [list(micro_batches(*arguments, worker, num_workers, position)) for worker in range(num_workers)]
    covered = [at for spans in lists for span in spans for at in range(span.start, span.stop)]
    assert sorted(covered) == list(range(position, shape["num_samples"]))
    # Every worker has the same number of micro-batches, in step with the others.
    assert len({len(spans) for spans in lists}) == 1
    for together in zip(*lists, strict=True):
        assert len({(s.step_start, s.step_stop, s.is_first, s.is_last) for s in together}) == 1
        assert all(s.step_start <= s.start <= s.stop <= s.step_stop for s in together)
    for spans in lists:
        num_steps = -(-(shape["num_samples"] - position) // shape["global_batch_size"])
        assert len(spans) == num_steps * shape["accumulate"]
        assert sum(s.is_first for s in spans) == sum(s.is_last for s in spans) == num_steps
        assert all(s.num_samples == s.stop - s.start for s in spans)


@settings(max_examples=100)
@given(st.integers(1, 400), st.integers(1, 120), st.integers(1, 9), st.integers(1, 5))
def test_global_batches_do_not_depend_on_workers_or_accumulation(
    num_samples: int, global_batch_size: int, num_workers: int, accumulate: int
) -> None:
    def batches(workers: int, times: int) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for worker in range(workers):
            for span in micro_batches(num_samples, global_batch_size, times, worker, workers):
                found.setdefault(span.step_start, []).extend(range(span.start, span.stop))
        return [sorted(found[start]) for start in sorted(found)]

    assert batches(num_workers, accumulate) == batches(1, 1)
    # One after the other, the workers' micro-batches are that of one worker.
    arguments = num_samples, global_batch_size, accumulate
    lists = [micro_batches(*arguments, worker, num_workers) for worker in range(num_workers)]
    for whole, *shares in zip(micro_batches(*arguments, 0, 1), *lists, strict=True):
        assert [(one.start, one.stop) for one in shares] == [
            part(whole.start, whole.stop, worker, num_workers) for worker in range(num_workers)
        ]


def test_a_run_resumes_from_any_position_with_the_same_batches() -> None:
    whole = list(micro_batches(100, 16, 2, 1, 3))
    for done in range(1, 7):
        assert list(micro_batches(100, 16, 2, 1, 3, position=16 * done)) == whole[2 * done :]
    assert list(micro_batches(100, 16, 2, 1, 3, position=100)) == []


def test_a_short_last_batch_may_leave_a_worker_empty_handed() -> None:
    spans = [list(micro_batches(9, 8, 1, worker, 4))[-1] for worker in range(4)]
    assert [span.num_samples for span in spans] == [0, 0, 0, 1]
    assert {span.step_samples for span in spans} == {1}
    assert spans[0] == MicroBatch(8, 8, 8, 9, True, True)
