"""A checkpoint of many ranks: its index stays small, and a reader opens what it needs of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stormo.checkpoint import (
    CheckpointWriteError,
    CorruptCheckpointError,
    Reader,
    RetentionPolicy,
    Shard,
    find,
    verify,
    whole_chunk,
    writer,
)
from stormo.checkpoint import reader as reader_module
from stormo.checkpoint.format import INDEX, Saved
from stormo.checkpoint.index import StoredChunk
from stormo.checkpoint.reader import ReadItem
from stormo.checkpoint.writer import Chunk, Publisher, ShardWriter, make_temp_dir
from tests.checkpoint.fake_sharded import read_tensor

RANKS, LAYERS, ROWS = 200, 8, 2  # rows of a rank
STATE = ("exp_avg", "exp_avg_sq")


def whole(name: str) -> Tensor:
    """The values of a tensor of the model or of the optimizer."""
    return torch.arange(RANKS * ROWS, dtype=torch.float32) + 10_000 * sum(name.encode())


NAMES = [f"layers.{layer}.weight" for layer in range(LAYERS)]
VALUES = {name: whole(name) for weight in NAMES for name in (weight, *(f"{weight}|{key}" for key in STATE))}


def chunks_of(rank: int, num_ranks: int) -> Iterator[Chunk]:
    num_rows = RANKS * ROWS // num_ranks
    for name, tensor in VALUES.items():
        section = "optimizer" if "|" in name else "model"
        start = rank * num_rows
        rows = tensor[start : start + num_rows]
        yield Chunk(section=section, name=name, whole_shape=tuple(tensor.shape), offset=(start,), tensor=rows)
        if not rank and "|" not in name:
            yield whole_chunk("optimizer", f"{name}|step", torch.tensor(3.0))
    yield whole_chunk("own", "random/torch_rng", torch.full((8,), rank))


def save(folder: Path, step: int, num_ranks: int = RANKS, max_index_bytes: int = writer.MAX_INDEX_BYTES) -> Saved:
    """What all ranks write, one after the other, and the first one publishes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(writer, "LARGEST_READ_BACK_BYTES", 0)  # as for a model that needs so many ranks
        new = make_temp_dir(folder, step, 0)
        for rank in range(num_ranks):
            ShardWriter(rank, Shard(chunks=list(chunks_of(rank, num_ranks)))).write(new.path, step)
        patch.setattr(writer, "MAX_INDEX_BYTES", max_index_bytes)
        policy = RetentionPolicy(step=step, identity="run", keep_last=1)
        return Publisher(folder, Shard(chunks=[], state={"step": step}), policy, num_ranks).publish(new.path)


@pytest.fixture(scope="module")
def _saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("many"), 1).path


@pytest.fixture
def saved(_saved_once: Path) -> Path:
    return _saved_once


def test_the_index_grows_with_ranks_and_with_tensors_but_not_with_their_product(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(saved)
    size_bytes = (saved / INDEX).stat().st_size
    assert size_bytes < 40 * (RANKS + 2 * len(VALUES))
    monkeypatch.setattr(reader_module, "MAX_INDEX_BYTES", size_bytes)
    with Reader(saved) as reader:
        assert reader.ranks() == list(range(RANKS))
        assert {*reader.entries("model"), *reader.entries("optimizer")} == VALUES.keys() | {f"{n}|step" for n in NAMES}
        assert torch.equal(read_tensor(reader, NAMES[3]), VALUES[NAMES[3]])


def wanted(rank: int, num_ranks: int) -> list[ReadItem]:
    """The chunks of one rank of another mesh."""
    rows = RANKS * ROWS // num_ranks
    return [
        ReadItem(
            section="optimizer" if "|" in name else "model", name=name, offset=(rank * rows,), into=torch.zeros(rows)
        )
        for name in VALUES
    ]


def test_a_rank_of_another_mesh_opens_the_files_it_needs_and_no_other(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[str] = set()
    original = Reader.open_file
    monkeypatch.setattr(Reader, "open_file", lambda self, name: (opened.add(name), original(self, name))[1])
    with Reader(saved) as reader:
        chunks = wanted(3, RANKS // 2)
        reader.fill(chunks)
        assert reader.rank_tensors(7)["random/torch_rng"].tolist() == [7] * 8
    for one in chunks:
        assert torch.equal(one.into, VALUES[one.name][12:16])
    assert {n for n in opened if n.startswith("shard-")} == {f"shard-{rank:05d}.safetensors" for rank in (6, 7)}
    assert len(reader._rank_indexes) == 2


def test_of_a_file_what_is_read_is_verified_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    """A flipped bit is an error for whoever reads it; nobody reads a whole file for a few chunks of it."""
    shard = saved / "shard-00006.safetensors"
    good = shard.read_bytes()
    with Reader(saved) as reader:
        chunk = reader.rank_index(6)["optimizer"][f"{NAMES[5]}|exp_avg"].chunks[0]
    assert isinstance(chunk, StoredChunk)
    try:
        shard.write_bytes(good[: chunk.start] + bytes([good[chunk.start] ^ 1]) + good[chunk.start + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"shard-00006\.safetensors: its SHA-256"):
            verify(saved)
        with Reader(saved) as reader:
            *others, broken = sorted(wanted(3, RANKS // 2), key=lambda one: one.name == f"{NAMES[5]}|exp_avg")
            reader.fill(others)
            assert all(torch.equal(one.into, VALUES[one.name][12:16]) for one in others)
            with pytest.raises(CorruptCheckpointError, match=r"shard-00006\.safetensors: the SHA-256 of its bytes"):
                reader.fill([broken])
    finally:
        shard.write_bytes(good)


def test_what_could_not_be_read_back_is_not_published_and_the_checkpoint_before_it_stays(tmp_path: Path) -> None:
    before = save(tmp_path, 1, num_ranks=2).path
    with pytest.raises(CheckpointWriteError, match=r"index\.json would be [\d,]+ bytes long"):
        save(tmp_path, 2, num_ranks=2, max_index_bytes=(before / INDEX).stat().st_size - 1)
    assert [found.step for found in find(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_older_checkpoints_stay_where_the_index_of_the_new_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, num_ranks=2)
    publish = writer.publish

    def damage(*arguments: object) -> Path:
        path: Path = publish(*arguments)  # type: ignore[arg-type]
        good = (path / INDEX).read_bytes()
        (path / INDEX).write_bytes(good[:-1] + b" ")
        return path

    monkeypatch.setattr(writer, "publish", damage)
    saved = save(tmp_path, 2, num_ranks=2)
    assert "step 2 does not read back as written" in saved.notices[0]
    assert [found.step for found in find(tmp_path)] == [2, 1]
