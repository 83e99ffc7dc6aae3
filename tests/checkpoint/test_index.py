"""An index that leaves out, repeats or invents chunks is refused in words."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch

from stormo.checkpoint.format import FileEntry
from stormo.checkpoint.index import (
    RankChunk,
    StoredChunk,
    TensorEntry,
    _require_covered,
    chunks_digest,
    copy_overlap,
    index_json,
    overlapping,
    parse_index,
    parse_rank_index,
    rank_index_json,
)
from stormo.checkpoint.tensors import weights_digest

FILE = "shard-00000.safetensors"
FILES = {
    name: FileEntry(size_bytes=1000, sha256="a" * 64)
    for rank in range(2)
    for name in (f"shard-0000{rank}.safetensors", f"index-0000{rank}.json", "state.json")
}
Spot = tuple[tuple[int, ...], tuple[int, ...]]


def entry(shape: tuple[int, ...], places: list[Spot]) -> TensorEntry:
    chunks = [StoredChunk(file=FILE, offset=o, shape=s, start=0, stop=0) for o, s in places]
    return TensorEntry(dtype=torch.float32, shape=shape, chunks=tuple(chunks))


def covers(shape: tuple[int, ...], places: list[Spot]) -> bool:
    try:
        _require_covered("w", places, shape)
    except ValueError:
        return False
    return True


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Spot]:
    """A tensor cut along each dimension, in other places in every slab."""
    if not shape:
        return [((), ())]
    borders = sorted({0, shape[0], *(draw.randrange(shape[0] + 1) for _ in range(2))})
    return [
        ((start, *offset), (stop - start, *size))
        for start, stop in itertools.pairwise(borders)
        for offset, size in cut(shape[1:], draw)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_chunks_cover_a_tensor_only_if_each_element_is_there_once(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(4)))
    places = cut(shape, draw)
    draw.shuffle(places)
    assert covers(shape, places)
    assert not covers(shape, places[1:])  # one is missing,
    assert not covers(shape, [*places, places[0]])  # one is there twice,
    if shape:
        offset, size = places[0]
        dim = draw.randrange(len(shape))
        moved = tuple(start + (index == dim) for index, start in enumerate(offset))
        assert not covers(shape, [(moved, size), *places[1:]])  # one lies elsewhere,
        larger = tuple(length + (index == dim) for index, length in enumerate(size))
        assert not covers(shape, [(offset, larger), *places[1:]])  # or reaches into its neighbour.


def test_a_tensor_without_elements_has_no_chunk_and_a_number_has_one() -> None:
    assert covers((0, 4), [])
    assert not covers((0, 4), [((0, 0), (0, 4))])
    assert covers((), [((), ())])
    assert not covers((), [])
    assert not covers((2, 2), [((0,), (2,))])


def test_many_chunks_of_a_hostile_index_are_judged_at_once() -> None:
    places = [((0, column), (5, 1)) for column in range(20_000)]
    assert covers((5, 20_000), places)
    assert not covers((5, 20_000), [*places[:-1], places[0]])


@pytest.mark.parametrize("seed", range(8))
def test_any_chunk_is_put_together_from_any_other_chunks(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 4)))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    stored = entry(shape, cut(shape, draw)).chunks
    for offset, size in cut(shape, draw):
        into = torch.full(size, -1.0, dtype=torch.float64)
        for box in overlapping(stored, offset, size):
            source = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
            copy_overlap(source, box.offset, into, offset)
        assert torch.equal(into, whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))])


HALF_DTYPES = [[0, [0, 0], [1, 3]], [1, [1, 0], [1, 3]]]


def index(**changes: Any) -> bytes:
    body = {
        "chunk_lists": [HALF_DTYPES, []],
        "model": {"w": ["F32", [2, 3], 0]},
        "optimizer": {"w|m": ["BF16", [0, 3], 1]},
    }
    return json.dumps({**body, **changes}).encode()


def test_an_index_survives_its_own_format_and_lists_equal_chunks_once() -> None:
    parsed = parse_index(index(model={"w": ["F32", [2, 3], 0], "tied": ["F32", [2, 3], 0, "w"]}), FILES)
    assert parsed["model"]["w"].chunks == (RankChunk(0, (0, 0), (1, 3)), RankChunk(1, (1, 0), (1, 3)))
    assert parsed["model"]["tied"] == parsed["model"]["w"]
    again = index_json(parsed)
    assert parse_index(again, FILES) == parsed
    assert json.loads(again)["chunk_lists"] == [HALF_DTYPES, []]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[]", "sections model and optimizer"),
        (index(local={}), "sections model and optimizer"),
        (b'{"model": ' * 200_000, "nested too deeply"),
        (b"\xff", "not valid JSON"),
        (index(chunk_lists={}), "not a list"),
        (index(chunk_lists=[3, []]), "not a list"),
        (index(chunk_lists=[[[0, [0, 0]]], []]), "not a rank, an offset and a shape"),
        (index(chunk_lists=[[[True, [0, 0], [1, 3]]], []]), "not a rank, an offset and a shape"),
        (index(chunk_lists=[[[-1, [0, 0], [1, 3]]], []]), "not a rank, an offset and a shape"),
        (index(chunk_lists=[[[2, [0, 0], [2, 3]]], []]), "no tensor file of this checkpoint"),
        (index(chunk_lists=[HALF_DTYPES[:1], []]), "do not cover its shape"),
        (index(chunk_lists=[[*HALF_DTYPES, HALF_DTYPES[0]], []]), "exactly once"),
        (index(model=[]), "section model is not an object"),
        (index(model={"w": {}}), "not a dtype, a shape and a list of chunks"),
        (index(model={"w": ["F31", [2, 3], 0]}), "no valid dtype"),
        (index(model={"w": [None, [2, 3], 0]}), "no valid dtype"),
        (index(model={"w": ["F32", None, 0]}), "no valid shape"),
        (index(model={"w": ["F32", [2, -3], 0]}), "no valid shape"),
        (index(model={"w": ["F32", [2, True], 0]}), "no valid shape"),
        (index(model={"w": ["F32", [0, 2**61, 2**61], 1]}), "no valid shape"),
        (index(model={"w": ["F32", [1] * 65, 0]}), "no valid shape"),
        (index(model={"w": ["F32", [2, 3], 2]}), "no valid list of chunks"),
        (index(model={"w": ["F32", [2, 3], True]}), "no valid list of chunks"),
        (index(model={"w": ["F32", [2, 3], 0, 7]}), "no valid list of chunks"),
        (index(model={"w": ["F32", [2], 0]}), "another number of dimensions"),
        (index(model={"w": ["F32", [2, 3], 0], "v": ["F32", [3, 3], 0]}), "the chunks of 'v' do not cover"),
    ],
)
def test_hostile_indexes_are_refused_with_a_reason(data: bytes, words: str) -> None:
    parse_index(index(), FILES)
    with pytest.raises(ValueError, match=words):
        parse_index(data, FILES)


def part(value: Any) -> bytes:
    return json.dumps({"model": {"w": value}}).encode()


def test_the_index_of_a_rank_survives_its_own_format() -> None:
    parsed = parse_rank_index(part(["F32", [2, 3], [[[1, 0], [1, 3], 100, "b" * 64]]]), 1, 112)
    assert parse_rank_index(rank_index_json(parsed), 1, 112) == parsed
    (stored,) = parsed["model"]["w"].chunks
    file = "shard-00001.safetensors"
    assert stored == StoredChunk(file=file, offset=(1, 0), shape=(1, 3), start=100, stop=112, sha256="b" * 64)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[]", "not an index of a rank"),
        (b'{"others": {}}', "not an index of a rank"),
        (b'{"model": []}', "section model is not an object"),
        (part({}), "not a dtype, a shape and a list of chunks"),
        (part(["F31", [2], []]), "no valid dtype"),
        (part(["F32", [2], [3]]), "no offset, shape, first byte and SHA-256"),
        (part(["F32", [2], [[[0], [2, 1], 0, "b" * 64]]]), "no valid offset, shape and first byte"),
        (part(["F32", [2], [[[0], [2], -8, "b" * 64]]]), "no valid offset, shape and first byte"),
        (part(["F32", [2], [[[0], [2], 0, None]]]), "no valid SHA-256"),
        (part(["F32", [2], [[[0], [2], 993, "b" * 64]]]), "lies in bytes 993 to 1001 of a file of 1000"),
    ],
)
def test_hostile_indexes_of_a_rank_are_refused_with_a_reason(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_rank_index(data, 0, 1000)


def test_the_digest_of_chunks_distinguishes_values_names_and_chunks() -> None:
    def digest(name: str, values: float, places: list[Spot]) -> str:
        chunks = [
            StoredChunk(
                file=FILE, offset=o, shape=s, start=0, stop=0, sha256=weights_digest({"k": torch.full(s, values)})
            )
            for o, s in places
        ]
        return chunks_digest({name: TensorEntry(dtype=torch.float32, shape=(4,), chunks=tuple(chunks))})

    halves: list[Spot] = [((0,), (2,)), ((2,), (2,))]
    assert digest("w", 1.0, halves) == digest("w", 1.0, halves[::-1])
    others = {digest("v", 1.0, halves), digest("w", 2.0, halves), digest("w", 1.0, [((0,), (4,))])}
    assert len({digest("w", 1.0, halves), *others}) == 4
