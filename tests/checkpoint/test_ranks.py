"""Whatever mesh has saved a model, any other takes it up to the last bit; and the failure of one is that of all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stormo import checkpoint
from stormo.checkpoint import (
    CorruptCheckpointError,
    Reader,
    RetentionPolicy,
    Saver,
    Snapshot,
    find,
    load,
    newest_good,
    ranks,
    read_manifest,
    saver,
    verify,
    weights_digest,
    writer,
)
from stormo.checkpoint.format import CHUNKS, VALUES
from stormo.checkpoint.index import StoredChunk
from stormo.checkpoint.writer import write_file
from stormo.distributed.world import World
from stormo.errors import SettingError, StormoError
from stormo.training.state import Progress, RunState
from tests.checkpoint.fake_sharded import (
    MESHES,
    FakeSharded,
    Model,
    read_chunk,
    require_whole,
    whole_values,
)

Ranks = Callable[..., list[Any]]
# Every mesh with an optimizer, so that each kind of state is cut in several ways.
CASES = list(zip(range(9), MESHES, ["adamw", "novograd", "sgd"] * 3, strict=True))


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saving(step: int) -> RetentionPolicy:
    return RetentionPolicy(step=step, identity="run", keep_last=9)


def run_state(strategy: FakeSharded, step: int = 0) -> RunState:
    loss_sum = torch.tensor(1.0 + strategy.world.rank, dtype=torch.float64)
    return RunState(progress=Progress(step=step), strategy=strategy, loss_sum=loss_sum)  # type: ignore[arg-type]


def save(strategy: FakeSharded, folder: str, step: int, *, in_background: bool = False) -> str:
    """Save under the strategy's mesh; the path on all workers."""
    world = strategy.world
    one = Saver(world, in_background=in_background)
    one.begin(run_state(strategy, step).content(world, 0), Path(folder) if world.is_main else None, saving(step))
    one.wait()
    done = one.finished()
    assert (done is None) is not world.is_main
    path: str = world.broadcast_object(None if done is None else str(done.saved.path))
    return path


def _save_all(world: World, folder: str, cases: list[tuple[int, str, str]]) -> list[str]:
    paths = []
    for seed, mesh, optimizer in cases:
        strategy = FakeSharded(world, mesh, optimizer)
        strategy.fill(seed)
        paths.append(save(strategy, f"{folder}/{mesh}", seed, in_background=bool(seed % 2)))
    return paths


def _take_all(world: World, folder: str, mesh: str, sources: list[tuple[int, str, str]]) -> list[str]:
    """Take up every checkpoint under a mesh; under one of them, save it again from there."""
    again = []
    for seed, optimizer, path in sources:
        strategy = FakeSharded(world, mesh, optimizer)
        state = run_state(strategy)
        state.restore(world, Path(path), 0)
        strategy.require(seed)
        assert (state.progress.step, state.progress.num_resumes, strategy.num_changes) == (seed, 1, 1)
        again.append(save(strategy, f"{folder}/{mesh}", seed) if mesh == "grid" else path)
    return again


def test_every_mesh_restores_what_every_mesh_has_saved_to_the_last_bit(run_ranks: Ranks, tmp_path: Path) -> None:
    sources: list[tuple[int, str, str]] = [(0, "adamw", str(_whole(tmp_path / "one", "adamw", 0)))]
    for size in (2, 3, 4):
        cases = [case for case in CASES if MESHES[case[1]].size == size]
        paths = run_ranks(_save_all, size, str(tmp_path), cases)[0]
        sources += [(seed, optimizer, path) for (seed, _, optimizer), path in zip(cases, paths, strict=True)]
    assert len(sources) == len(CASES)
    for mesh in ("rows 3", "stages", "grid"):
        paths = run_ranks(_take_all, MESHES[mesh].size, str(tmp_path / "again"), mesh, sources)[0]
        for path, (seed, optimizer, _) in zip(paths, sources, strict=True):
            require_whole(load(path), optimizer, seed)
            verify(path)


def _whole(folder: Path, optimizer: str, seed: int) -> Path:
    values = whole_values(optimizer, seed)
    model = Model()
    model.load_state_dict({n: t for n, t in values.items() if "|" not in n}, strict=False)
    random_tensors, random_values = checkpoint.collect_random_state()
    snapshot = Snapshot(
        model=model.state_dict(),
        optimizer={name: tensor for name, tensor in values.items() if "|" in name},
        ranks={f"0/random/{name}": tensor for name, tensor in random_tensors.items()},
        state={
            **{"world_size": 5, "random": [random_values], "scaler": {}, "noise_scale": None},
            **{"losses": [1.0], "items": [0.0]},
            "progress": asdict(Progress(step=seed)),
        },
    )
    return checkpoint.save(folder, snapshot, RetentionPolicy(step=seed, identity="", keep_last=1)).path


def _own_things(world: World, folder: str) -> tuple[Any, ...]:
    """What a worker has of its own, saved and taken up by the same mesh, then by another one."""
    strategy = FakeSharded(world, "stages of rows")
    strategy.fill(1)
    torch.manual_seed(100 + world.rank)
    path = save(strategy, folder, 1)
    drawn = torch.rand(3).numpy()
    found = []
    for mesh in ("stages of rows", "rows 4"):
        again = FakeSharded(world, mesh)
        state = run_state(again)
        state.restore(world, Path(path), 0)
        buffers = {name: buffer.numpy().copy() for name, buffer in again.named_buffers()}
        found.append((torch.rand(3).numpy(), buffers, float(state.loss_sum)))
    return drawn, *found


def test_the_same_mesh_resumes_exactly_and_another_with_means_and_new_generators(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    results = run_ranks(_own_things, 4, str(tmp_path))
    for rank, (drawn, same, other) in enumerate(results):
        assert np.array_equal(same[0], drawn)
        assert same[2] == 1.0 + rank
        assert same[1]["table"].tolist() == [1.0 + 2 * rank] * 3
        if rank < 2:  # the first stage
            assert same[1]["norm.running_mean"].tolist() == [1.0 + 2 * rank] * 2
        assert not np.array_equal(other[0], drawn)
        assert other[2] == (1.0 + 2.0 + 3.0 + 4.0) / 4
        # The mean of the two workers that have them; what is no part of the state is as it was made.
        assert other[1]["norm.running_mean"].tolist() == [2.0, 2.0]
        assert other[1]["norm.num_batches_tracked"] == 1
        assert other[1]["table"].tolist() == [0.0] * 3
    assert len({tuple(other[0]) for _, _, other in results}) == 4


def _digests(world: World, folder: str, limit_bytes: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "LARGEST_READ_BACK_BYTES", limit_bytes)
        strategy = FakeSharded(world, "rows 2")
        strategy.fill(1)
        return save(strategy, folder, 1)


def test_the_digest_is_that_of_one_process_unless_the_model_is_large(run_ranks: Ranks, tmp_path: Path) -> None:
    small, large = (run_ranks(_digests, 2, str(tmp_path / str(limit)), limit)[0] for limit in (10**6, 10))
    assert read_manifest(small).digest_of == VALUES
    assert read_manifest(small).weights_sha256 == weights_digest(load(small).model)
    assert read_manifest(large).digest_of == CHUNKS
    assert read_manifest(large).weights_sha256 != weights_digest(load(large).model)


# --- failures ---


def _error_of(call: Callable[[], object]) -> tuple[str, int]:
    try:
        call()
    except StormoError as error:
        return str(error), error.exit_code
    raise AssertionError("nothing was raised")


def _cannot_write(world: World, folder: str, in_background: bool) -> tuple[str, int]:
    strategy = FakeSharded(world, "rows 3")
    strategy.fill(1)
    save(strategy, folder, 1)

    def full(file: Path, *rest: Any) -> Any:
        if file.name == "shard-00001.safetensors":
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return write_file(file, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormo.checkpoint.writer.write_file", full)
        return _error_of(lambda: save(strategy, folder, 2, in_background=in_background))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_of_one_worker_ends_the_save_on_all_with_its_error(
    run_ranks: Ranks, tmp_path: Path, in_background: bool
) -> None:
    errors = set(run_ranks(_cannot_write, 3, str(tmp_path), in_background))
    assert len(errors) == 1
    ((text, exit_code),) = errors
    assert text.startswith(f"Rank 1's part of the checkpoint of step 2 could not be written to {tmp_path} (No space")
    assert text.endswith("checkpoints are untouched: make room, then resume (a run: with --resume).")
    assert exit_code == 1
    assert listed(tmp_path) == ["step-00000001"]
    verify(tmp_path / "step-00000001")


def _not_seen(world: World, folder: str) -> tuple[str, int]:
    strategy = FakeSharded(world, "rows 2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_SEEN_WITHIN_S", 0.1)
        if world.rank == 1:
            patch.setattr(ranks.Path, "is_dir", lambda self: False)
        return _error_of(lambda: save(strategy, folder, 1))


def test_a_worker_that_does_not_see_the_folder_is_named_by_all_before_anything_is_written(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    errors = run_ranks(_not_seen, 2, str(tmp_path))
    assert errors[0] == errors[1]
    assert "rank 1 on host localhost does not see it; set --runs-folder to a folder that all nodes see." in errors[0][0]
    assert errors[0][1] == SettingError.exit_code
    assert listed(tmp_path) == []


def _forgets(world: World, folder: str) -> tuple[str, int]:
    strategy = FakeSharded(world, "rows 2")
    if world.rank == 1:
        strategy._parts = [part for part in strategy.shards() if part.name != "first.weight"]
        strategy.optimizer = torch.optim.SGD([part.local for part in strategy._parts], lr=1.0)
    return _error_of(lambda: save(strategy, folder, 1))


def test_chunks_that_do_not_make_a_whole_are_not_published(run_ranks: Ranks, tmp_path: Path) -> None:
    for text, _ in run_ranks(_forgets, 2, str(tmp_path)):
        assert "are incomplete (the chunks of 'first.weight' do not cover its shape [7, 6] exactly once)" in text
    assert listed(tmp_path) == []


def _restores(world: World, path: str, module: str = "") -> tuple[str, int]:
    modules = {"": Model(), "more": nn.Sequential(Model(), nn.Linear(2, 2)), "wider": nn.Linear(2, 2)}
    if module == "less":
        modules["less"] = Model()
        del modules["less"].norm
    if module == "wider":
        modules["wider"] = Model()
        modules["wider"].first = nn.Linear(6, 9)
    strategy = FakeSharded(world, "rows 2", module=modules[module])
    return _error_of(lambda: run_state(strategy).restore(world, Path(path), 0))


@pytest.fixture(scope="module")
def _saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def saved(run_ranks: Ranks, tmp_path: Path, _saved_once: Path) -> Path:
    """Steps 0 and 1, by three workers, of which the later one is returned."""
    if not find(_saved_once):
        run_ranks(_two_steps, 3, str(_saved_once))
    folder = tmp_path / "checkpoints"
    shutil.copytree(_saved_once, folder)
    return folder / "step-00000001"


def _two_steps(world: World, folder: str) -> str:
    strategy = FakeSharded(world, "rows 3")
    for step in (0, 1):
        strategy.fill(step)
        path = save(strategy, folder, step)
    return path


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("more", "has no 0.norm.num_batches_tracked, which the model has"),
        ("less", "has norm.bias, which this model lacks"),
        ("wider", "has first.weight of shape [7, 6], but the model's has shape [9, 6]"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_all(
    run_ranks: Ranks, saved: Path, module: str, words: str
) -> None:
    errors = run_ranks(_restores, 2, str(saved), module)
    assert errors[0] == errors[1]
    assert words in errors[0][0]


def test_a_flipped_bit_in_the_part_of_one_worker_is_reported_by_all_with_the_good_one(
    run_ranks: Ranks, saved: Path
) -> None:
    shard = saved / "shard-00002.safetensors"  # which the first of two workers does not read
    good = shard.read_bytes()
    with Reader(saved) as reader:
        (chunk,) = reader.rank_index(2)["optimizer"]["first.weight|exp_avg"].chunks
    assert isinstance(chunk, StoredChunk)
    shard.write_bytes(good[: chunk.start] + bytes([good[chunk.start] ^ 1]) + good[chunk.start + 1 :])
    errors = run_ranks(_restores, 2, str(saved))
    assert errors[0] == errors[1]
    assert errors[0][0].startswith(f"{shard}: the SHA-256 of its bytes ")
    assert errors[0][0].endswith(
        f"the newest good checkpoint is that of step 0: --resume {saved.parent}/step-00000000."
    )
    assert errors[0][1] == CorruptCheckpointError.exit_code


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "index.json", "index-00001.json", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "link", "pipe"])
def test_every_file_is_verified_before_it_is_used(saved: Path, tmp_path: Path, name: str, damage: str) -> None:
    file = saved / name
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:-2] + bytes([good[-2] ^ 16]) + good[-1:])
    elif damage == "cut":
        os.truncate(file, len(good) - 1)
    elif damage == "missing":
        file.unlink()
    elif damage == "link":
        shutil.move(file, tmp_path / "outside")
        file.symlink_to(tmp_path / "outside")
    else:
        file.unlink()
        os.mkfifo(file)
    for read in (verify, load):
        with pytest.raises(CorruptCheckpointError) as caught:
            read(saved)
        assert str(caught.value).startswith(f"{file}: ")
    good_one, _ = newest_good(saved.parent)
    assert good_one == find(saved.parent)[1]


def test_only_the_files_with_something_wanted_are_read(saved: Path) -> None:
    with Reader(saved) as reader:
        (saved / "shard-00000.safetensors").unlink()
        (saved / "shard-00002.safetensors").write_bytes(b"")
        weight = whole_values("adamw", 1)["first.weight"]
        assert torch.equal(read_chunk(reader, "first.weight", (3, 0), (3, 6)), weight[3:6])
        with pytest.raises(CorruptCheckpointError, match=r"shard-00000\.safetensors: it is missing"):
            read_chunk(reader, "first.weight", (2, 0), (3, 6))
