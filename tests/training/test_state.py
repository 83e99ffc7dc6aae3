"""A run that is saved and restored is the run that was never stopped; another number of workers can restore it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stormo import checkpoint
from stormo.distributed.world import World
from tests.tiny_run import Parts, arrays, assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
FLAGS: dict[str, Any] = {"global_batch_size": 16, "optimizer": "sgd"}
OPTIONS: dict[str, Any] = {"num_train": 40, "dropout": 0.3, "jitter": True}
SEED = 0


class WithConstant(Tiny):
    """A model with a buffer that is made anew rather than saved, such as a table of positions."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        return model


def _save(parts: Parts, folder: str) -> str | None:
    snapshot = parts.state.snapshot(parts.world, SEED)
    assert (snapshot is None) is not parts.world.is_main
    if snapshot is None:
        return None
    policy = checkpoint.RetentionPolicy(step=parts.state.progress.step, identity="x", keep_last=9)
    saved = checkpoint.save(folder, snapshot, policy)
    return str(saved.path)


def _restore(parts: Parts, path: str) -> None:
    parts.state.restore_snapshot(parts.world, checkpoint.load(path) if parts.world.is_main else None, SEED)


def _whole_and_resumed(world: World, folder: str, flags: dict[str, Any], saved_at: int) -> tuple[Any, Any, Any, Any]:
    """Seven steps in one go, with a checkpoint on the way, and the same from that checkpoint in a new model."""
    whole = build(world, OPTIONS, **flags)
    whole.strategy.warm_up(whole.loader)
    first = steps(whole, saved_at)
    path = world.broadcast_object(_save(whole, folder))
    losses = steps(whole, 7 - saved_at)
    end = whole_state(whole)
    whole.loader.close()

    torch.manual_seed(99)  # whatever the generators are at the start of a resume
    resumed = build(world, OPTIONS, **flags)
    resumed.strategy.warm_up(resumed.loader)
    _restore(resumed, path)
    assert (resumed.state.progress.step, resumed.state.progress.num_resumes) == (saved_at, 1)
    losses_again = steps(resumed, 7 - saved_at)
    assert resumed.state.progress.sample_order_sha256 == whole.state.progress.sample_order_sha256
    assert len(first) == saved_at
    return end, whole_state(resumed), losses, losses_again


@pytest.mark.parametrize(
    ("size", "flags", "saved_at"),
    [
        (1, {}, 2),  # in the middle of epoch 1, whose last batch is short
        (3, {}, 2),
        (2, {}, 3),  # at its end
        (1, {"optimizer": "adamw", "clip_norm": 0.5, "sync_batch_norm": True}, 4),
        (3, {"optimizer": "adamw", "clip_norm": 0.5, "sync_batch_norm": True}, 4),
        (2, {"precision": "fp16"}, 2),
        (2, {}, 0),  # before the first step: there is no state in the optimizer yet
    ],
)
def test_a_resumed_run_is_the_whole_run_to_the_last_bit(
    run_ranks: Ranks, tmp_path: Path, size: int, flags: dict[str, Any], saved_at: int
) -> None:
    for end, end_again, losses, losses_again in run_ranks(
        _whole_and_resumed, size, str(tmp_path), FLAGS | flags, saved_at
    ):
        assert losses == losses_again
        assert_same_bits(end, end_again)


def _train_and_save(world: World, folder: str, flags: dict[str, Any], options: dict[str, Any], num: int) -> Any:
    parts = build(world, options, **flags)
    steps(parts, num)
    path = _save(parts, folder)
    return path, whole_state(parts)


def _restored(world: World, path: str, flags: dict[str, Any], options: dict[str, Any], num: int) -> Any:
    parts = build(world, options, **flags)
    _restore(parts, path)
    state = whole_state(parts)
    losses = steps(parts, num)
    return state, losses, arrays(parts.strategy.module.named_parameters()), asdict(parts.state.progress)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 4)])
def test_another_number_of_workers_takes_weights_optimizer_loss_and_mean_statistics(
    run_ranks: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    saved = run_ranks(_train_and_save, before, str(tmp_path), FLAGS, OPTIONS, 2)
    path = saved[0][0]
    states = [state for _, state in saved]
    restored = [state for state, *_ in run_ranks(_restored, after, path, FLAGS, OPTIONS, 0)]
    for name, value in states[0].items():
        if name in ("torch_rng", "loss_sum", "lr"):
            continue
        expected = value
        if name.endswith(("running_mean", "running_var")):
            wide = np.stack([state[name] for state in states]).astype(np.float64)
            expected = wide.mean(axis=0).astype(np.float32)
        for state in restored:
            assert np.array_equal(state[name], expected), name
    total = sum(state["loss_sum"] for state in states)
    assert sum(state["loss_sum"] for state in restored) == pytest.approx(total, rel=1e-12)
    generators = [state["torch_rng"].tobytes() for state in restored]
    assert len(set(generators)) == after  # every worker draws its own dropout,
    again = [state["torch_rng"].tobytes() for state, *_ in run_ranks(_restored, after, path, FLAGS, OPTIONS, 0)]
    assert again == generators  # and the same one whenever this checkpoint is restored


def test_in_exact_arithmetic_another_number_of_workers_resumes_as_if_nothing_had_happened(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_train": 37, "dropout": 0.0, "jitter": True}
    flags = {"precision": "fp64", "sync_batch_norm": True, "global_batch_size": 16}
    ((_, whole),) = run_ranks(_train_and_save, 1, str(tmp_path / "whole"), flags, options, 7)
    saved = run_ranks(_train_and_save, 2, str(tmp_path / "part"), flags, options, 4)
    for _, losses, parameters, progress in run_ranks(_restored, 3, saved[0][0], flags, options, 3):
        assert len(losses) == 3
        assert (progress["step"], progress["samples_seen"]) == (7, 37 + 37 + 16)
        for name, value in parameters.items():
            np.testing.assert_allclose(value, whole[name], rtol=1e-9, atol=1e-9)


def test_the_checkpoint_holds_plain_names_and_each_worker_s_own_part(run_ranks: Ranks, tmp_path: Path) -> None:
    saved = run_ranks(_train_and_save, 2, str(tmp_path), FLAGS, OPTIONS, 2)
    snapshot = checkpoint.load(saved[0][0])
    assert set(snapshot.model) == set(Tiny().model().state_dict())  # no wrapper's prefix
    assert {name.partition("/")[0] for name in snapshot.ranks} == {"0", "1"}
    assert snapshot.state["world_size"] == 2
    assert not torch.equal(snapshot.ranks["0/random/torch_rng"], snapshot.ranks["1/random/torch_rng"])
    Tiny().model().load_state_dict(dict(snapshot.model))


def _with_constant(world: World, folder: str, flags: dict[str, Any], is_changed: bool) -> tuple[Any, Any, str]:
    parts = build(world, {"num_train": 40}, task_class=WithConstant, **flags)
    steps(parts, 1)
    if is_changed:
        dict(parts.strategy.named_buffers())["table"].add_(1 + world.rank)
    path = _save_sharded(parts, folder)
    again = build(world, {"num_train": 40}, task_class=WithConstant, **flags)
    again.state.restore(world, Path(path), SEED)
    return arrays(parts.strategy.named_buffers()), arrays(again.strategy.named_buffers()), path


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_replica", [True, False])
def test_buffers_that_all_workers_have_alike_are_stored_once_and_others_by_each_worker(
    run_ranks: Ranks, tmp_path: Path, strategy: str, is_replica: bool
) -> None:
    flags = {**FLAGS, "strategy": strategy, "sync_batch_norm": is_replica}
    results = run_ranks(_with_constant, 2, str(tmp_path), flags, not is_replica)
    for before, after, _ in results:
        assert_same_bits(before, after)
    stored = {name for name in checkpoint.load(results[0][2]).ranks if "/buffer/" in name}
    if is_replica:  # the others are in the model's state
        assert stored == {"0/buffer/table"}
    else:
        names = {name for name in results[0][0] if not name.endswith("num_batches_tracked")}
        assert stored == {f"{rank}/buffer/{name}" for rank in range(2) for name in names}


def _save_sharded(parts: Parts, folder: str) -> str:
    """As a run saves it; the path on all workers."""
    world, saver = parts.world, checkpoint.Saver(parts.world, in_background=False)
    step = parts.state.progress.step
    policy = checkpoint.RetentionPolicy(step=step, identity="x", keep_last=9, keep_best=0, metric=None)
    saver.begin(parts.state.content(world, SEED), Path(folder) if world.is_main else None, policy)
    saver.wait()
    done = saver.finished()
    path: str = world.broadcast_object(str(done.saved.path) if done is not None else None)
    return path


def _held(parts: Parts) -> dict[str, Any]:
    """Everything of this worker that must be the same to the last bit in two runs that are one."""
    strategy = parts.strategy
    found: dict[str, Any] = {}
    for part in strategy.shards():
        state = {key: t for key, t in strategy.optimizer.state.get(part.local, {}).items() if t is not None}
        found |= {f"{part.name}{part.offset}{key}": t for key, t in {"": part.local, **state}.items()}
    found |= dict(strategy.named_buffers())
    return {**arrays(found.items()), "loss_sum": float(parts.state.loss_sum), "rng": torch.get_rng_state().numpy()}


def _sharded_and_resumed(world: World, folder: str, flags: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    whole = build(world, OPTIONS, **flags)
    whole.strategy.warm_up(whole.loader)
    steps(whole, 2)
    path = _save_sharded(whole, folder)
    losses = steps(whole, 3)
    end = _held(whole)
    torch.manual_seed(99)
    resumed = build(world, OPTIONS, **flags)
    resumed.strategy.warm_up(resumed.loader)
    resumed.state.restore(world, Path(path), SEED)
    assert (resumed.state.progress.step, resumed.state.progress.num_resumes) == (2, 1)
    return end, losses, steps(resumed, 3), _held(resumed)


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": "fsdp", "optimizer": "adamw"},
        {"strategy": "zero1"},
        {"strategy": "server", "servers": 2, "optimizer": "adamw"},
    ],
    ids=str,
)
def test_a_sharded_run_that_is_resumed_by_its_mesh_is_the_whole_run_to_the_last_bit(
    run_ranks: Ranks, tmp_path: Path, flags: dict[str, Any]
) -> None:
    for end, losses, losses_again, end_again in run_ranks(_sharded_and_resumed, 2, str(tmp_path), FLAGS | flags):
        assert losses == losses_again
        assert_same_bits(end, end_again)


def _continued(world: World, folder: str, path: str, flags: dict[str, Any], num: int) -> tuple[str, list[float]]:
    """From a checkpoint, or from the beginning, for some steps; what was reached is saved."""
    parts = build(world, {"num_train": 37, "dropout": 0.0, "jitter": True}, **flags)
    parts.strategy.warm_up(parts.loader)
    if path:
        parts.state.restore(world, Path(path), SEED)
    losses = steps(parts, num)
    return _save_sharded(parts, folder), losses


def test_in_exact_arithmetic_one_mesh_after_the_other_resumes_as_one_process(run_ranks: Ranks, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"precision": "fp64", "sync_batch_norm": True, "global_batch_size": 16}
    ((whole, _),) = run_ranks(_continued, 1, str(tmp_path / "whole"), "", flags, 10)
    path = ""
    for size, strategy in ((2, "ddp"), (3, "server"), (3, "fsdp"), (2, "zero2"), (1, "single")):
        path, _ = run_ranks(_continued, size, str(tmp_path / strategy), path, {**flags, "strategy": strategy}, 2)[0]
    reached, expected = checkpoint.load(path), checkpoint.load(whole)
    assert reached.state["progress"]["sample_order_sha256"] == expected.state["progress"]["sample_order_sha256"]
    for section in ("model", "optimizer"):
        assert getattr(reached, section).keys() == getattr(expected, section).keys()
        for name, tensor in getattr(expected, section).items():
            torch.testing.assert_close(getattr(reached, section)[name], tensor, rtol=1e-9, atol=1e-9)
