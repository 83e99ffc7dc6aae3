"""What is not as it was written is never loaded, and the error says which file and why."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stormo.checkpoint import (
    CheckpointWriteError,
    CorruptCheckpointError,
    Reader,
    RetentionPolicy,
    Shard,
    Snapshot,
    find,
    load,
    newest_good,
    read_manifest,
    read_state,
    save,
    verify,
    weights_digest,
    whole_chunk,
)
from stormo.checkpoint import reader as reader_module
from stormo.checkpoint.format import FILES, INDEX, MANIFEST, STATE, TENSOR_FILES, FileEntry, Manifest, parse_manifest
from stormo.checkpoint.writer import Publisher, ShardWriter, make_temp_dir, rank_manifest_name
from stormo.errors import EXIT_USAGE
from tests.checkpoint.fake_sharded import read_chunk, read_tensor

ALL_FILES = (*FILES, MANIFEST)


@pytest.fixture
def folder(tmp_path: Path, make_snapshot: Callable[[int], Snapshot]) -> Path:
    """Steps 1 and 2, both good."""
    for step in (1, 2):
        save(tmp_path, make_snapshot(step), RetentionPolicy(step=step, identity="run", keep_last=5))
    return tmp_path


@pytest.fixture
def newest(folder: Path) -> Path:
    return folder / "step-00000002"


def reseal(checkpoint: Path, name: str, data: bytes) -> None:
    """What an attacker can do: other content, with a manifest that agrees."""
    (checkpoint / name).unlink()
    (checkpoint / name).write_bytes(data)
    manifest = parse_manifest((checkpoint / MANIFEST).read_bytes())
    entry = FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (checkpoint / MANIFEST).write_bytes(replace(manifest, files={**manifest.files, name: entry}).to_bytes())


def refused(checkpoint: Path, file: str, words: str) -> None:
    """Both readers refuse it, naming the file; the loader offers the other one."""
    for read in (verify, load):
        with pytest.raises(CorruptCheckpointError) as caught:
            read(checkpoint)
        message = str(caught.value)
        assert message.startswith(f"{checkpoint / file}: ")
        assert re.search(words, message), message
        assert message.endswith(".")
        assert caught.value.exit_code == EXIT_USAGE
    assert f"--resume {checkpoint.parent / 'step-00000001'}" in message


def test_what_was_saved_is_what_is_loaded(
    folder: Path,
    make_snapshot: Callable[[int], Snapshot],
    assert_same: Callable[[Snapshot, Snapshot], None],
) -> None:
    found = find(folder)
    assert [f.step for f in found] == [2, 1]
    for f in found:
        loaded = load(f.path)
        assert_same(loaded, make_snapshot(f.step))
        assert verify(f.path) == read_manifest(f.path)
        assert verify(f.path).weights_sha256 == weights_digest(loaded.model)
    assert newest_good(folder) == (found[0], ())


def test_the_state_alone_is_verified_and_read_without_the_tensors(newest: Path) -> None:
    whole = load(newest).state
    for name in TENSOR_FILES:
        (newest / name).write_bytes(b"")
    assert read_state(newest) == whole
    state = newest / STATE
    state.write_bytes(state.read_bytes().replace(b'"step": 2', b'"step": 3'))
    with pytest.raises(CorruptCheckpointError, match="at least one byte changed since it was written"):
        read_state(newest)


def test_loaded_tensors_are_independent_and_writable(newest: Path) -> None:
    model = load(newest).model
    model["tied.a"].fill_(7.0)
    assert not torch.equal(model["tied.a"], model["tied.b"])


@pytest.mark.parametrize("name", ALL_FILES)
def test_one_flipped_bit_anywhere_is_found(newest: Path, name: str) -> None:
    file = newest / name
    good = file.read_bytes()
    choose = random.Random(name)
    for _ in range(15):
        bit = choose.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        refused(newest, name, "at least one byte changed|not valid|format version|not the manifest")
    file.write_bytes(good)
    verify(newest)


def test_every_single_bit_of_the_manifest_counts(newest: Path) -> None:
    good = (newest / MANIFEST).read_bytes()
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^it "):
            parse_manifest(bytes(bad))


@pytest.mark.parametrize("name", ALL_FILES)
def test_every_length_but_the_right_one_is_found(newest: Path, name: str) -> None:
    good = (newest / name).read_bytes()
    lengths = {0, 1, 7, 8, 9, len(good) // 2, len(good) - 1}
    if name in TENSOR_FILES:
        header = int.from_bytes(good[:8], "little")
        lengths |= {8 + header // 2, 8 + header, 8 + header + 1}
    for length in sorted(lengths - {len(good)}):
        (newest / name).write_bytes(good[:length])
        words = "not valid JSON|own SHA-256" if name == MANIFEST else rf"is {length:,} bytes long.*{len(good):,}: .*cut"
        refused(newest, name, words)
    (newest / name).write_bytes(good + b"\0")
    refused(newest, name, "not valid JSON" if name == MANIFEST else "something was added to it")


def test_an_extra_file_is_neither_read_nor_a_problem(newest: Path) -> None:
    os.mkfifo(newest / "extra.pt")  # reading it would wait for ever
    assert load(newest).state["step"] == 2
    assert newest_good(newest.parent)[0] == find(newest.parent)[0]


def test_two_files_that_swapped_places_are_found(newest: Path) -> None:
    older = newest.parent / "step-00000001"
    shutil.copy(older / "model.safetensors", newest / "model.safetensors")
    refused(newest, "model.safetensors", "at least one byte changed")


def test_a_whole_model_of_another_step_is_found_by_the_digest_of_its_weights(newest: Path) -> None:
    reseal(newest, "model.safetensors", (newest.parent / "step-00000001" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: the digest of its weights"):
        load(newest)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_a_link_a_pipe_and_a_folder_are_refused_at_once(newest: Path, name: str, tmp_path: Path) -> None:
    file, outside = newest / name, tmp_path / "outside"
    shutil.move(file, outside)
    refused(newest, name, "it is missing")
    file.symlink_to(outside)  # even to the right content
    refused(newest, name, "it is a symbolic link")
    file.unlink()
    os.mkfifo(file)
    refused(newest, name, "not a regular file")
    file.unlink()
    file.mkdir()
    refused(newest, name, "not a regular file|cannot be read")


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_under_any_name_is_never_run(newest: Path, tmp_path: Path, name: str, zipped: bool) -> None:
    marker = tmp_path / "ran"
    buffer = io.BytesIO()
    if zipped:
        torch.save({"weight": Payload(marker)}, buffer)
    else:
        pickle.dump(Payload(marker), buffer)
    if name == MANIFEST:
        (newest / name).write_bytes(buffer.getvalue())
    else:
        reseal(newest, name, buffer.getvalue())
    with pytest.raises(CorruptCheckpointError, match=re.escape(f"{name}: it ")):
        load(newest)
    assert not marker.exists()
    if not zipped:  # the payload is a live one
        pickle.loads(buffer.getvalue())
        assert marker.exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff" * 8, "claims a header of 18,446,744,073,709,551,615 bytes"),
        (b"", "too short"),
        ((10**8 + 1).to_bytes(8, "little") + b" " * 100, "claims a header of 100,000,001 bytes"),
        ((2).to_bytes(8, "little") + b"{}" + b"\0" * 9, "not a valid safetensors file"),
    ],
)
def test_a_resealed_tensor_file_with_a_hostile_header_is_refused(newest: Path, data: bytes, words: str) -> None:
    reseal(newest, "ranks.safetensors", data)
    with pytest.raises(CorruptCheckpointError, match=rf"ranks\.safetensors: .*{words}"):
        load(newest)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[1, 2]", "JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_resealed_state_that_is_no_object_is_refused(newest: Path, data: bytes, words: str) -> None:
    reseal(newest, "state.json", data)
    with pytest.raises(CorruptCheckpointError, match=rf"state\.json: .*{words}"):
        load(newest)


def test_a_file_larger_than_memory_is_refused_before_it_is_read(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (newest / "model.safetensors").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size - 1}.__getitem__)
        with pytest.raises(
            CorruptCheckpointError, match=rf"it is {size:,} bytes long, this machine has {size - 1:,} bytes of memory"
        ):
            load(newest)
        patch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 10 * size}.__getitem__)
        load(newest)


def sealed(**changes: Any) -> bytes:
    """A manifest with hostile values and a seal that agrees."""
    files = {name: FileEntry(size_bytes=1, sha256="a" * 64) for name in FILES}
    manifest = Manifest(step=1, identity="run", metric=None, weights_sha256="b" * 64, files=files)
    body = json.loads(manifest.to_bytes())
    del body["manifest_sha256"]
    body.update(changes)
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    body["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def entries(**more: Any) -> dict[str, Any]:
    return {**{name: {"size_bytes": 1, "sha256": "a" * 64} for name in FILES}, **more}


GOOD_ENTRY = {"size_bytes": 1, "sha256": "a" * 64}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sealed(files=entries(**{"../../model.safetensors": GOOD_ENTRY})), "no part of a checkpoint"),
        (sealed(files=entries(**{"/etc/passwd": GOOD_ENTRY})), "no part of a checkpoint"),
        (sealed(files=entries(**{"..": GOOD_ENTRY})), "no part of a checkpoint"),
        (sealed(files=entries(**{"model.pt": GOOD_ENTRY})), "no part of a checkpoint"),
        (sealed(files={}), "does not list model.safetensors"),
        (sealed(files=[]), "its files is not valid"),
        (sealed(files=entries(**{"state.json": {"size_bytes": -1, "sha256": "a" * 64}})), "valid size"),
        (sealed(files=entries(**{"state.json": {"size_bytes": True, "sha256": "a" * 64}})), "valid size"),
        (sealed(files=entries(**{"state.json": {"size_bytes": 1, "sha256": "A" * 64}})), "valid size"),
        (sealed(files=entries(**{"state.json": None})), "valid size"),
        (sealed(version=2), "format version 2, this stormo reads versions 1 and 4"),
        (sealed(version=3), "format version 3, this stormo reads versions 1 and 4"),
        (sealed(version=True), "format version True"),
        (sealed(version=None), "format version None"),
        (sealed(format="other"), "not the manifest of a stormo checkpoint"),
        (sealed(step=-1), "step"),
        (sealed(step=True), "step"),
        (sealed(step="1"), "step"),
        (sealed(identity=3), "identity"),
        (sealed(metric="high"), "metric"),
        (sealed(metric=float("nan")), "metric|own SHA-256"),
        (sealed(weights_sha256=None), "weights_sha256"),
        (b"[]", "not the manifest"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xff", "not valid JSON"),
        (sealed().replace(b'"step": 1', b'"step":  1'), "own SHA-256"),
        (sealed().replace(b'"step": 1', b'"step": 0,\n "step": 1'), "own SHA-256"),
    ],
)
def test_hostile_manifests_are_refused_with_a_reason(newest: Path, data: bytes, words: str) -> None:
    (newest / MANIFEST).write_bytes(data)
    refused(newest, MANIFEST, words)


def test_the_hostile_manifests_are_refused_for_what_was_changed_only() -> None:
    parse_manifest(sealed())


def test_a_manifest_without_end_is_not_read_to_its_end(newest: Path) -> None:
    os.truncate(newest / MANIFEST, 2**40)  # sparse
    refused(newest, MANIFEST, "longer than 16,777,216 bytes")


def test_a_folder_that_is_not_there_is_reported_with_the_good_one(newest: Path) -> None:
    missing = newest.parent / "step-00000009"
    with pytest.raises(CorruptCheckpointError, match=re.escape("there is no such folder; the newest good")) as caught:
        load(missing)
    assert f"--resume {newest}." in str(caught.value)


def test_without_any_good_one_the_error_says_so(newest: Path) -> None:
    for found in find(newest.parent):
        (found.path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="there is no good checkpoint in"):
        load(newest)
    good, problems = newest_good(newest.parent)
    assert good is None
    assert [problem.path.parent.name for problem in problems] == ["step-00000002", "step-00000001"]


def test_the_newest_good_one_is_found_behind_bad_ones(newest: Path) -> None:
    (newest / "state.json").write_bytes(b"{}")
    good, problems = newest_good(newest.parent)
    assert good is not None
    assert good.step == 1
    assert [problem.path for problem in problems] == [newest / "state.json"]


def test_only_published_folders_are_found(tmp_path: Path) -> None:
    for name in (
        "step-00000005", "step-00000003.2", "step-00000003", "step-123456789",
        "step-7", "step-00000006.tmp", ".step-00000008", "best", "xstep-00000009", "step-00000009x",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    (tmp_path / "step-00000011").symlink_to(tmp_path / "step-00000005")
    names = [found.path.name for found in find(tmp_path)]
    assert names == ["step-123456789", "step-00000005", "step-00000003.2"]
    assert find(tmp_path / "nothing") == []
    assert newest_good(tmp_path / "nothing") == (None, ())


def test_a_manifest_survives_its_own_format() -> None:
    manifest = parse_manifest(sealed(metric=0.1, identity="è \u2028"))
    assert parse_manifest(manifest.to_bytes()) == manifest
    assert asdict(manifest)["metric"] == 0.1


def test_a_folder_below_a_file_holds_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert find(tmp_path / "file" / "checkpoints") == []


# --- chunks ---


def test_chunks_of_whole_tensors_are_read_from_the_file_that_holds_them(
    newest: Path, make_snapshot: Callable[[int], Snapshot]
) -> None:
    expected = make_snapshot(2)
    with Reader(newest) as reader:
        assert set(reader.entries("model")) == set(expected.model)
        assert reader.state() == expected.state
        for name, tensor in expected.model.items():
            assert torch.equal(read_tensor(reader, name), tensor)
            assert read_tensor(reader, name).dtype == tensor.dtype
        chunk = read_chunk(reader, "conv.weight", (3, 0, 1, 1), (4, 2, 2, 1))
        assert torch.equal(chunk, expected.model["conv.weight"][3:7, 0:2, 1:3, 1:2])
        with pytest.raises(ValueError, match="has no chunk"):
            read_chunk(reader, "conv.weight", (3, 0, 1, 1), (400, 2, 2, 1))
        (newest / "model.safetensors").write_bytes(b"")
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: it is 0 bytes long"):
            read_tensor(reader, "mask")
        optimizer = newest / "optimizer.safetensors"  # damaged before its header was read
        optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"?")
        with pytest.raises(CorruptCheckpointError, match=r"optimizer\.safetensors: its SHA-256 is "):
            reader.entries("optimizer")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w":3}',
        b'{"w":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
        b'{"w":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}',
        b'{"w":' * 100_000,
    ],
)
def test_a_resealed_header_that_makes_no_sense_is_refused_by_the_reader_of_chunks(newest: Path, header: bytes) -> None:
    reseal(newest, "model.safetensors", len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with Reader(newest) as reader, pytest.raises(CorruptCheckpointError, match="not a valid safetensors file"):
        reader.entries("model")


def sharded(folder: Path, spoil: Callable[[Path], object] = lambda manifest: None) -> Path:
    """One worker's checkpoint of two tensors of eight bytes each; its manifest may be spoilt before it is published."""
    chunks = [whole_chunk("model", "a", torch.ones(2)), whole_chunk("optimizer", "a|momentum_buffer", torch.zeros(2))]
    shard = Shard(chunks=chunks, state={})
    new = make_temp_dir(folder, 3, 0)
    ShardWriter(0, shard).write(new.path, 3)
    spoil(new.path / rank_manifest_name(0))
    saving = RetentionPolicy(step=3, identity="", keep_last=1)
    return Publisher(folder, shard, saving, 1).publish(new.path).path


def _link(manifest: Path) -> None:
    manifest.rename(manifest.with_name("elsewhere"))
    manifest.symlink_to("elsewhere")


def _pipe(manifest: Path) -> None:
    manifest.unlink()
    os.mkfifo(manifest)


def _of_another_rank(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("shard-00000.", "shard-00001."))


def _outside(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("shard-00000.", "../shard-00000."))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_link, "it is a symbolic link"),
        (_pipe, "it is not a regular file"),
        (_of_another_rank, "shard-00001.safetensors is no file of rank 0"),
        (_outside, "../shard-00000.safetensors is no file of rank 0"),
        (lambda manifest: os.truncate(manifest, 1 << 40), "bytes long, of which"),
    ],
)
def test_a_rank_manifest_that_the_worker_has_not_written_is_not_published(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    with pytest.raises(CheckpointWriteError, match=r"was not published, as the files of the workers") as caught:
        sharded(tmp_path, spoil)
    assert problem in str(caught.value)
    assert find(tmp_path) == []


def test_a_resealed_index_is_refused_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sharded(tmp_path)
    index, part = (json.loads((path / name).read_bytes()) for name in (INDEX, "index-00000.json"))
    assert torch.equal(load(path).model["a"], torch.ones(2))
    (first,), (second,) = part["model"]["a"][2], part["optimizer"]["a|momentum_buffer"][2]
    own = list(second)
    second[2] = first[2] - 4
    reseal(path, "index-00000.json", json.dumps(part).encode())
    with pytest.raises(CorruptCheckpointError, match=r"index-00000\.json: two of its chunks share bytes"):
        load(path)
    second[2] = first[2]
    reseal(path, "index-00000.json", json.dumps(part).encode())
    with pytest.raises(CorruptCheckpointError, match=r"index-00000\.json: .* shares its bytes"):
        load(path)
    second[:] = [*own[:3], "0" * 64]
    reseal(path, "index-00000.json", json.dumps(part).encode())
    with pytest.raises(CorruptCheckpointError, match=r"shard-00000\.safetensors: the SHA-256 of its bytes "):
        load(path)
    del part["optimizer"]["a|momentum_buffer"]
    reseal(path, "index-00000.json", json.dumps(part).encode())
    with pytest.raises(CorruptCheckpointError, match=r"index-00000\.json: it lacks the chunk of 'a\|momentum_buffer'"):
        load(path)
    index["optimizer"] = index["model"] = {}
    reseal(path, INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptCheckpointError, match=r"index\.json: the digest of its weights"):
        load(path)
    monkeypatch.setattr(reader_module, "MAX_INDEX_BYTES", 10)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json: it is [\d,]+ bytes long, of which 10 are allowed"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest_of": "names"}, "of values or chunks"),
        ({"files": {"../shard-00000.safetensors": GOOD_ENTRY}}, "no part of a checkpoint"),
        ({"files": {"model.safetensors": GOOD_ENTRY}}, "no part of a checkpoint"),
        ({"files": {"ranks.safetensors": GOOD_ENTRY}}, "no part of a checkpoint"),
        ({"files": {"shard-00000.safetensors": GOOD_ENTRY}}, "does not list index.json"),
    ],
)
def test_hostile_manifests_of_shards_are_refused_with_a_reason(changes: dict[str, Any], words: str) -> None:
    files = dict.fromkeys((INDEX, STATE, "shard-00000.safetensors", "index-00000.json"), GOOD_ENTRY)
    good = {"version": 4, "digest_of": "chunks", "files": files}
    assert parse_manifest(sealed(**good)).version == 4
    with pytest.raises(ValueError, match=words):
        parse_manifest(sealed(**{**good, **changes}))
