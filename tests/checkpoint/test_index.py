"""The index says where every box is; one that leaves out, repeats or invents something is refused in words."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch

from stormo.checkpoint.index import (
    Entry,
    StoredBox,
    boxes_digest,
    copy_overlap,
    overlapping,
    parse_index,
    require_whole,
    to_json,
)
from stormo.checkpoint.layout import FileEntry
from stormo.checkpoint.tensors import values_digest

FILE = "shard-00000.safetensors"
FILES = {FILE: FileEntry(size_bytes=1000, sha256="a" * 64), "state.json": FileEntry(size_bytes=1000, sha256="a" * 64)}
Place = tuple[tuple[int, ...], tuple[int, ...]]


def entry(shape: tuple[int, ...], places: list[Place]) -> Entry:
    boxes = [StoredBox(file=FILE, key="k", offset=o, shape=s, start=0, stop=0) for o, s in places]
    return Entry(dtype=torch.float32, shape=shape, boxes=tuple(boxes))


def fills(shape: tuple[int, ...], places: list[Place]) -> bool:
    try:
        require_whole({"model": {"w": entry(shape, places)}, "optimizer": {}})
    except ValueError:
        return False
    return True


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Place]:
    """A tensor cut along each dimension, in other places in every slab."""
    if not shape:
        return [((), ())]
    borders = sorted({0, shape[0], *(draw.randrange(shape[0] + 1) for _ in range(2))})
    return [
        ((start, *offset), (stop - start, *size))
        for start, stop in itertools.pairwise(borders)
        for offset, size in cut(shape[1:], draw)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_boxes_fill_a_tensor_only_if_each_place_is_there_once(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(4)))
    places = cut(shape, draw)
    draw.shuffle(places)
    assert fills(shape, places)
    assert not fills(shape, places[1:])  # one is missing,
    assert not fills(shape, [*places, places[0]])  # one is there twice,
    if shape:
        offset, size = places[0]
        dim = draw.randrange(len(shape))
        moved = tuple(start + (index == dim) for index, start in enumerate(offset))
        assert not fills(shape, [(moved, size), *places[1:]])  # one lies elsewhere,
        larger = tuple(length + (index == dim) for index, length in enumerate(size))
        assert not fills(shape, [(offset, larger), *places[1:]])  # or reaches into its neighbour.


def test_a_tensor_without_elements_has_no_box_and_a_number_has_one() -> None:
    assert fills((0, 4), [])
    assert not fills((0, 4), [((0, 0), (0, 4))])
    assert fills((), [((), ())])
    assert not fills((), [])
    assert not fills((2, 2), [((0,), (2,))])


def test_a_hundred_thousand_boxes_of_a_hostile_index_are_judged_at_once() -> None:
    places = [((0, column), (5, 1)) for column in range(100_000)]
    assert fills((5, 100_000), places)
    assert not fills((5, 100_000), [*places[:-1], places[0]])


@pytest.mark.parametrize("seed", range(20))
def test_any_box_is_put_together_from_any_other_boxes(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 4)))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    stored = entry(shape, cut(shape, draw)).boxes
    for offset, size in cut(shape, draw):
        into = torch.full(size, -1.0, dtype=torch.float64)
        for box in overlapping(stored, offset, size):
            source = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
            copy_overlap(source, box.offset, into, offset)
        assert torch.equal(into, whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))])


def box(**changes: Any) -> dict[str, Any]:
    return {"file": FILE, "key": "model/w", "offset": [0, 0], "shape": [2, 3], "bytes": [100, 124], **changes}


def index(**changes: Any) -> bytes:
    good = {"dtype": "F32", "shape": [2, 3], "boxes": [box()]}
    return json.dumps({"model": {"w": {**good, **changes}}, "optimizer": {}}).encode()


def test_an_index_survives_its_own_format() -> None:
    parsed = parse_index(index(boxes=[box(sha256="b" * 64)]), FILES)
    assert parse_index(json.dumps(to_json(parsed)).encode(), FILES) == parsed
    (stored,) = parsed["model"]["w"].boxes
    assert (stored.start, stored.stop, stored.sha256) == (100, 124, "b" * 64)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[]", "sections model and optimizer"),
        (b'{"model": {}}', "sections model and optimizer"),
        (b'{"model": {}, "optimizer": []}', "section optimizer is not an object"),
        (b'{"model": ' * 200_000, "nested too deeply"),
        (b"\xff", "not valid JSON"),
        (index(dtype="F31"), "no valid dtype"),
        (index(dtype=None), "no valid dtype"),
        (index(shape=None), "no valid shape"),
        (index(shape=[2, -3]), "no valid shape"),
        (index(shape=[2, True]), "no valid shape"),
        (index(shape=[0, 2**61, 2**61], boxes=[]), "no valid shape"),
        (index(shape=[1] * 65), "no valid shape"),
        (index(boxes=None), "no list of boxes"),
        (index(boxes=[3]), "not an object"),
        (index(boxes=[]), "do not fill its shape"),
        (index(boxes=[box(), box()]), "each place once"),
        (index(shape=[4, 3], boxes=[box(), box(offset=[1, 0])]), "each place once"),
        (index(boxes=[box(offset=[0])]), "another number of dimensions"),
        (index(boxes=[box(file="../shard-00000.safetensors")]), "no file of tensors of this checkpoint"),
        (index(boxes=[box(file="/etc/passwd")]), "no file of tensors of this checkpoint"),
        (index(boxes=[box(file="state.json")]), "no file of tensors of this checkpoint"),
        (index(boxes=[box(file="shard-00001.safetensors")]), "no file of tensors of this checkpoint"),
        (index(boxes=[box(key=None)]), "no valid key, offset, shape and bytes"),
        (index(boxes=[box(bytes=[100])]), "no valid key, offset, shape and bytes"),
        (index(boxes=[box(bytes=[-24, 0])]), "no valid key, offset, shape and bytes"),
        (index(boxes=[box(bytes=[100, 123])]), "does not lie in bytes 100 to 123"),
        (index(boxes=[box(bytes=[990, 1014])]), "does not lie in bytes 990 to 1014"),
        (index(boxes=[box(sha256="x")]), "no valid SHA-256"),
    ],
)
def test_hostile_indexes_are_refused_in_words(data: bytes, words: str) -> None:
    parse_index(index(), FILES)
    with pytest.raises(ValueError, match=words):
        parse_index(data, FILES)


def test_the_digest_of_boxes_tells_values_names_and_cuts_apart() -> None:
    def digest(name: str, values: float, places: list[Place]) -> str:
        boxes = [
            StoredBox(
                file=FILE, key="k", offset=o, shape=s, start=0, stop=0, sha256=values_digest("k", torch.full(s, values))
            )
            for o, s in places
        ]
        return boxes_digest({name: Entry(dtype=torch.float32, shape=(4,), boxes=tuple(boxes))})

    halves: list[Place] = [((0,), (2,)), ((2,), (2,))]
    assert digest("w", 1.0, halves) == digest("w", 1.0, halves[::-1])
    others = {digest("v", 1.0, halves), digest("w", 2.0, halves), digest("w", 1.0, [((0,), (4,))])}
    assert len({digest("w", 1.0, halves), *others}) == 4
