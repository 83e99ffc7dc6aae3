"""Data of other libraries: Hugging Face sets, webdataset shards, torchdata's loader, each with the real package."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stormo.data import reading
from stormo.data.bookmarks import Bookmark, digest
from stormo.data.loaders import IterableLoader, Share, StreamedLoader
from stormo.data.reading import is_stream
from stormo.distributed.world import World as Workers
from stormo.launch import alone
from stormo.script import streams
from tests.script.loops import make, world_of

CPU = torch.device("cpu")
NUM = 40
SHARE = Share(global_batch_size=6, accumulate=1, worker=0, num_workers=1)


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_dict({"x": list(range(NUM)), "text": [f"word {n}" for n in range(NUM)]})


def _no_augment(batch: Any, _: Any) -> Any:
    return batch


def test_a_hugging_face_set_is_read_by_one_call_for_a_batch(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    kind, many = type(hugging_face), type(hugging_face).__getitems__
    monkeypatch.setattr(kind, "__getitems__", lambda self, keys: calls.append(len(keys)) or many(self, keys))
    loader = StreamedLoader(hugging_face, SHARE, 0, 0, _no_augment, CPU, 0)
    batches = [batch.data for batch in loader.epoch(1)]
    assert sorted(x for batch in batches for x in batch["x"].tolist()) == list(range(NUM))
    assert [text for batch in batches for text in batch["text"]] == [
        f"word {x}" for batch in batches for x in batch["x"].tolist()
    ]
    assert calls == [6, 6, 6, 6, 6, 4]  # the first batch finds out, sample by sample, whether reading draws


class _Counted:
    """A stream that counts what is read of it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_read = inner, 0

    def __iter__(self) -> Iterator[Any]:
        for sample in self.inner:
            self.num_read += 1
            yield sample

    def __len__(self) -> int:
        return NUM

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def _loader(data: Any, *, repeat: bool = False) -> IterableLoader:
    return IterableLoader(data, NUM, SHARE, 3, 0, _no_augment, CPU, 0, repeat=repeat)


def _read(loader: IterableLoader, epoch: int, position: int) -> list[list[int]]:
    return [batch.data["x"].tolist() for batch in loader.epoch(epoch, position)]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_streamed_set_continues_from_its_own_state(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, epoch: int, repeat: bool
) -> None:
    monkeypatch.setattr(reading, "SECONDS_BETWEEN_BOOKMARKS", 0.0)
    make: Callable[[], Any] = lambda: hugging_face.to_iterable_dataset(num_shards=3)  # noqa: E731
    loader = _loader(_Counted(make()), repeat=repeat)
    whole = [_read(loader, number, 0) for number in range(1, epoch + 1)][-1]
    mark = loader.bookmark(epoch, 24)
    assert mark is not None
    assert mark["position"] == (epoch - 1) * NUM + 24
    resumed = _loader(data := _Counted(make()), repeat=repeat)
    resumed.resume_from(mark)
    assert _read(resumed, epoch, 24) == whole[4:]
    assert data.num_read == 0  # a copy of it went on from the state


def test_a_state_without_its_shuffle_buffer_is_not_used(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "SECONDS_BETWEEN_BOOKMARKS", 0.0)
    make: Callable[[], Any] = lambda: hugging_face.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=9)  # noqa: E731
    loader = _loader(_Counted(make()))
    whole = _read(loader, 1, 0)
    resumed = _loader(data := _Counted(make()))
    resumed.resume_from(loader.bookmark(1, 24))
    assert _read(resumed, 1, 24) == whole[4:]
    assert data.num_read == NUM
    assert "stormo: the stream does not continue from its saved state" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_shards_are_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    with wds.ShardWriter(str(tmp_path / "shard-%02d.tar"), maxcount=15, verbose=0) as writer:
        for number in range(NUM):
            writer.write({"__key__": f"{number:03d}", "json": {"x": number}})
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a worker of two
    shards = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    data = wds.WebDataset(shards, nodesplitter=None, shardshuffle=False).decode().map(lambda sample: sample["json"])
    assert is_stream(data)
    assert Bookmark.make(data, 0, 0) is None  # read up to where it was
    loader = _loader(data)
    whole = _read(loader, 1, 0)
    assert [x for batch in whole for x in batch] == list(range(NUM))
    assert _read(_loader(data), 1, 24) == whole[4:]
    gc.collect()  # webdataset leaves its files to it


def test_digests_tell_samples_apart() -> None:
    samples = [{"x": 1}, {"x": 2}, {"y": 1}, ["1"], [1], torch.ones(2), torch.ones(2).half(), torch.ones(1, 2), None]
    assert len({digest(sample) for sample in samples}) == len(samples) - 1  # halves compare as floats
    assert digest(torch.ones(2)) == digest(torch.ones(2))


@dataclass
class _Pair:
    x: Any
    y: str = "y"


def test_the_digests_of_equal_samples_are_equal() -> None:
    def samples() -> list[Any]:
        return [
            torch.tensor([1.0, math.nan]),
            torch.eye(3).to_sparse(),
            _Pair(torch.ones(2)),
            numpy.array(["a", None], dtype=object),
            {"pairs": [_Pair(numpy.ones(2)), _Pair(torch.ones(2, dtype=torch.bfloat16))]},
        ]

    assert [digest(sample) for sample in samples()] == [digest(sample) for sample in samples()]
    assert len({digest(sample) for sample in samples()}) == len(samples())
    assert digest(_Pair(torch.ones(2))) != digest(_Pair(torch.zeros(2)))


def _stream(hugging_face: Any, kind: str) -> tuple[Any, int | None]:
    data = hugging_face.select_columns("x").to_iterable_dataset(num_shards=3)
    if kind == "shuffled":
        return data.shuffle(seed=1, buffer_size=9), 6
    if kind == "torchdata":
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        return stateful.StatefulDataLoader(data, batch_size=6), None
    return data, 6


def _epochs(hugging_face: Any, kind: str, folder: Path, stop_at: int | None) -> tuple[list[list[int]], int]:
    """The batches of two epochs of a script, until it is stopped; and how many samples its set was asked for."""
    world = world_of(Workers(alone(), CPU))
    data, size = _stream(hugging_face, kind)
    model, optimizer = world.wrap(*make())
    loader = world.loader(data, size)
    epoch, seen = world.load(folder).get("epoch", 0), []
    num_read = 0
    of_set: Any = type(loader.dataset)
    plain = of_set.__iter__

    def counted(self: Any) -> Iterator[Any]:
        nonlocal num_read
        for sample in plain(self):
            num_read += 1
            yield sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_set, "__iter__", counted)
        for number in range(epoch, 2):
            for batch in loader:
                optimizer.zero_grad()
                x = batch["x"].to(torch.float64)
                world.backward((model.last.weight.sum() * x).mean())
                optimizer.step()
                seen.append(batch["x"].tolist())
                if len(seen) == stop_at:
                    world.save(folder, epoch=number)
                    return seen, num_read
    return seen, num_read


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["streamed", "torchdata", "shuffled"])
@pytest.mark.parametrize("stop_at", [4, 10])
def test_a_script_continues_a_stream_from_its_own_state(
    hugging_face: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    stop_at: int,
) -> None:
    monkeypatch.setattr(streams, "SECONDS_BETWEEN_BOOKMARKS", 0.0)
    whole, _ = _epochs(hugging_face, kind, tmp_path / "whole", None)
    assert len(whole) == 14
    first, _ = _epochs(hugging_face, kind, tmp_path / "part", stop_at)
    second, num_read = _epochs(hugging_face, kind, tmp_path / "part", None)
    assert first + second == whole
    num_left = sum(map(len, second))
    if kind == "shuffled":
        assert "does not continue from its saved state" in capsys.readouterr().err
    else:
        assert num_read == num_left + 6  # the last batch before it is read again, and compared
