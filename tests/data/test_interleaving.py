"""Many files are one stream: each sample once, in an order that neither workers nor a resume change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stormo.data import interleave
from stormo.data.interleaving import Interleaved
from stormo.data.loaders import IterableLoader, Share
from stormo.data.reading import is_stream, known_length
from stormo.errors import SettingError

LENGTHS = {"a": 3, "b": 0, "c": 5, "d": 1, "e": 4, "f": 2}
NUM_SAMPLES = sum(LENGTHS.values())


def _read(file: str) -> Iterator[Tensor]:
    """Which file, which sample of it, and a random number."""
    for number in range(LENGTHS[file]):
        yield torch.tensor([float(ord(file)), float(number), float(torch.rand(()))])


def _files(cycle: int = 3, *, shuffle: bool = True) -> Interleaved[str]:
    return interleave(list(LENGTHS), _read, cycle=cycle, shuffle=shuffle, num_samples=NUM_SAMPLES)


def _named(samples: list[Tensor]) -> str:
    return " ".join(f"{chr(int(sample[0]))}{int(sample[1])}" for sample in samples)


def test_open_files_take_turns_and_one_that_ends_gives_its_place_to_the_next() -> None:
    assert _named([*_files(2, shuffle=False)]) == "a0 c0 a1 c1 a2 c2 d0 c3 e0 c4 e1 f0 e2 f1 e3"
    assert _named([*_files(1, shuffle=False)]) == "a0 a1 a2 c0 c1 c2 c3 c4 d0 e0 e1 e2 e3 f0 f1"
    assert _named([*_files(99, shuffle=False)]) == "a0 c0 d0 e0 f0 a1 c1 e1 f1 a2 c2 e2 c3 e3 c4"


def _epoch(num_workers: int, epoch: int, position: int = 0) -> Tensor:
    """The samples of all workers in the order of the stream."""
    steps: dict[int, list[Tensor]] = {}
    for worker in range(num_workers):
        share = Share(global_batch_size=4, accumulate=1, worker=worker, num_workers=num_workers)
        loader = IterableLoader(_files(), NUM_SAMPLES, share, 5, 0, lambda data, _: data, torch.device("cpu"), 0)
        for batch in loader.epoch(epoch, position):
            if not batch.is_padding:
                steps.setdefault(batch.span.step_start, []).append(batch.data)
    return torch.cat([torch.cat(steps[start]) for start in sorted(steps)])


def test_the_order_follows_from_seed_and_epoch_alone_and_is_found_again_from_any_position() -> None:
    first, second = _epoch(1, 1), _epoch(1, 2)
    assert _named([*first]) != _named([*second])
    for samples in (first, second):
        assert Counter(chr(int(sample[0])) for sample in samples) == Counter(LENGTHS)
        assert len({*_named([*samples]).split()}) == NUM_SAMPLES
    for num_workers in (1, 2, 3):
        assert torch.equal(_epoch(num_workers, 1), first)
        assert torch.equal(_epoch(num_workers, 2, position=8), second[8:])


def test_it_is_a_stream_whose_length_may_be_unknown() -> None:
    unknown = interleave(["a"], _read)
    assert is_stream(unknown)
    assert (known_length(unknown), known_length(_files())) == (None, NUM_SAMPLES)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(SettingError, match="no files"):
        interleave([], _read)
    with pytest.raises(SettingError, match="cycle=0"):
        interleave(["a"], _read, cycle=0)
    with pytest.raises(SettingError, match="num_samples=-1"):
        interleave(["a"], _read, num_samples=-1)
    for unordered in ("a", iter(["a"]), {"a"}):
        with pytest.raises(SettingError, match=f"given a {type(unordered).__name__}, but it takes a list"):
            interleave(unordered, _read)  # type: ignore[arg-type]
