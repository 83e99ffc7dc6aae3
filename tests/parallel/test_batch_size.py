"""`--batch-size auto`: the search, what a try leaves behind, memory, and the command from start to summary."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from stormo.cli import main
from stormo.config.layout import resolve_layout
from stormo.config.options import make_config
from stormo.config.plan import resolve
from stormo.config.schema import TrainConfig
from stormo.data.loaders import IterableLoader, ResidentLoader, Share
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.launch import alone
from stormo.parallel import memory
from stormo.parallel.base import Strategy
from stormo.parallel.batch_size import StateSnapshot, find_micro_batch_size, search
from stormo.system.hardware import visible_gpus
from tests.commands.test_train import TASK, in_ranks, summary
from tests.tiny_run import Parts, arrays, assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny, points

Ranks = Callable[..., list[Any]]
AUTO: dict[str, Any] = {"batch_size": "auto"}


@contextmanager
def _filled(limit: str) -> Iterator[None]:
    os.environ["TINY_MEMORY"] = limit
    try:
        yield
    finally:
        del os.environ["TINY_MEMORY"]


def _find(parts: Parts) -> None:
    parts.plan = find_micro_batch_size(parts.config, parts.plan, parts.strategy, parts.loader)


def _world() -> World:
    return World(alone(), torch.device("cpu"))


# --- which sizes are tried --------------------------------------------------------------------------------------------


def _searched(most: int, limit: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    return search(most, fits), tried


@pytest.mark.parametrize(
    ("most", "limit", "found", "tried"),
    [
        (512, 1000, 512, [32, 64, 128, 256, 512]),
        (100, 1000, 100, [32, 64, 100]),
        (8, 1000, 8, [8]),
        (1, 1, 1, [1]),
        (512, 200, 192, [32, 64, 128, 256, 192]),  # up to 255 it would be three passes all the same
        (10_000, 200, 192, [32, 64, 128, 256, 192, 224, 208]),
        (512, 10, 10, [32, 16, 8, 12, 10, 11]),
        (512, 1, 1, [32, 16, 8, 4, 2, 1]),
        (512, 0, 0, [32, 16, 8, 4, 2, 1]),
    ],
)
def test_sizes_are_doubled_or_halved_then_bisected(most: int, limit: int, found: int, tried: list[int]) -> None:
    assert _searched(most, limit) == (found, tried)


@given(st.integers(1, 100_000), st.integers(1, 200_000))
def test_an_eighth_more_does_not_fit_or_saves_no_micro_batch(most: int, limit: int) -> None:
    found, tried = _searched(most, limit)
    assert 1 <= found <= min(most, limit)
    assert max(tried) <= most
    assert len(tried) == len(set(tried)) <= 2 * math.log2(most) + 5
    best = min(most, limit)
    assert best - found <= max(1, found / 8) or math.ceil(most / best) == math.ceil(most / found)


@pytest.mark.parametrize(
    "words",
    [
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    ],
)
def test_errors_of_cudnn_mean_out_of_memory_except_for_one_sample(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(_world(), **AUTO, global_batch_size=64)
    step, limit = parts.strategy.try_step, 20

    def short(data: Any) -> None:
        if len(data[0]) > limit:
            raise RuntimeError(words)
        step(data)

    monkeypatch.setattr(parts.strategy, "try_step", short)
    _find(parts)
    assert parts.plan.micro_batch_size <= limit
    limit = 0
    with pytest.raises(RuntimeError, match=words[:20]):
        _find(parts)


# --- what all ranks come to -------------------------------------------------------------------------------------------


def _plan_with(world: World, limit: str, flags: dict[str, Any]) -> tuple[int, int, str, int]:
    parts = build(world, **AUTO, **flags)
    with _filled(limit):
        _find(parts)
    assert parts.loader.share.accumulate == parts.plan.accumulate
    assert parts.loader.share.global_batch_size == parts.plan.global_batch_size
    sizes = [batch.span.num_samples for batch in parts.loader.epoch(1)]
    return parts.plan.accumulate, parts.plan.micro_batch_size, dict(parts.plan.explanation)["global batch"], max(sizes)


@pytest.mark.parametrize(
    ("size", "sync", "limit", "accumulate", "reason"),
    [
        (1, False, "* 50", 3, "48 fits with .* GiB, 64 does not"),
        (2, False, "* 20", 4, "20 fits with .* GiB, 22 does not"),
        # With synchronised norms a rank that continues would wait for the one that has run out of memory.
        (2, True, "1 20", 4, "20 fits with .* GiB, 22 does not"),
    ],
)
def test_all_ranks_use_micro_batches_that_fit_all(
    run_ranks: Ranks, size: int, sync: bool, limit: str, accumulate: int, reason: str
) -> None:
    results = run_ranks(_plan_with, size, limit, {"global_batch_size": 128, "sync_batch_norm": sync})
    assert len(set(results)) == 1
    assert results[0][0] == accumulate
    assert results[0][1] == results[0][3] == math.ceil(128 / size / accumulate)
    assert re.search(reason, results[0][2])


def test_the_default_batch_is_split(run_ranks: Ranks) -> None:
    for accumulate, num_samples, text, _ in run_ranks(_plan_with, 2, "0 9", {}):
        assert (accumulate, num_samples) == (4, 8)
        assert "8 fits" in text


def test_nothing_above_the_share_of_the_training_set_is_tried(run_ranks: Ranks) -> None:
    ((accumulate, num_samples, _, _),) = run_ranks(_plan_with, 1, "* 1001", {"global_batch_size": 5000})
    assert (accumulate, num_samples) == (1, 1001)


def _refused(world: World, task_options: dict[str, Any], limit: str, flags: dict[str, Any]) -> str:
    parts = build(world, task_options, **AUTO, **flags)
    with _filled(limit), pytest.raises(StormoError) as caught:
        _find(parts)
    return str(caught.value)


def test_all_ranks_refuse_a_sample_that_does_not_fit_on_one(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_refused, 2, {"norm": False}, "1 0", {}):
        assert sentence.startswith("--batch-size auto was set, but one sample does not fit into ")
        assert "beside the model of 195 parameters (0.00 GiB, " in sentence
        assert sentence.endswith("a 16-bit --precision, or a device with more memory.")


def test_batch_norm_is_not_asked_for_statistics_of_one_sample(run_ranks: Ranks) -> None:
    (sentence,) = run_ranks(_refused, 1, {}, "* 1", {})
    assert "a micro-batch of two samples does not fit into" in sentence
    assert "and batch norm can make no statistics of a single sample beside the model" in sentence
    (sentence,) = run_ranks(_refused, 1, {}, "* 100", {"global_batch_size": 1})
    assert sentence == (
        "a global batch of 1 was set for 1 worker, but that is one sample for each and batch norm can make no "
        "statistics of a single sample; set a larger --global-batch-size, or --sync-batch-norm."
    )


class Picky(Tiny):
    """Does not like large batches, for a reason of its own."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 40:
            raise RuntimeError("no more than 40, please")
        return super().loss(model, batch)


def test_other_errors_are_raised_as_they_are() -> None:
    parts = build(_world(), task_class=Picky, global_batch_size=128, **AUTO)
    with pytest.raises(RuntimeError, match="no more than 40, please"):
        _find(parts)


# --- no trace ---------------------------------------------------------------------------------------------------------


def _everything(parts: Parts) -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        **whole_state(parts),
        "python_rng": hash(random.getstate()),
        "numpy_rng": np.append(numpy_state[1], numpy_state[2]),
        "modes": [layer.training for layer in parts.strategy.module.modules()],
        "groups": str([{k: v for k, v in g.items() if k != "params"} for g in parts.strategy.optimizer.param_groups]),
    }


class Restless(Tiny):
    """Draws random numbers wherever it can."""

    def augment(self, batch: Any, draws: Tensor) -> Any:
        return batch[0] + 0.001 * torch.randn(8) + random.random() + np.random.rand(), batch[1]


def _has_no_side_effects(world: World, flags: dict[str, Any]) -> None:
    parts = build(world, {"jitter": True}, task_class=Restless, global_batch_size=128, **AUTO, **flags)
    strategy = parts.strategy
    strategy.module.get_submodule("3").eval()
    scaler = strategy.scaler
    before = _everything(parts)
    with _filled("1 20" if world.size > 1 else "* 20"):
        _find(parts)
    assert_same_bits(_everything(parts), before)
    assert len(strategy.optimizer.state) == 0
    assert all(parameter.grad is None for parameter in strategy.module.parameters())
    assert strategy.scaler is scaler
    assert getattr(scaler, "_scale", None) is None
    assert parts.loader.wait_s == 0.0


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, {"optimizer": "sgd", "precision": "fp16"}),
        (2, {"optimizer": "adamw", "sync_batch_norm": True, "clip_norm": 1.0, "weight_decay": 0.1}),
    ],
    ids=["sgd fp16", "adamw"],
)
def test_the_search_has_no_side_effects(run_ranks: Ranks, size: int, flags: dict[str, Any]) -> None:
    run_ranks(_has_no_side_effects, size, flags)


class Adagrad(Tiny):
    """Its optimizer has state from the start."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.5)


def test_initial_optimizer_state_is_restored() -> None:
    parts = build(_world(), task_class=Adagrad)
    (first,) = parts.strategy.optimizer.param_groups[0]["params"][:1]
    first.grad = torch.ones_like(first)
    kept, total = first.grad, parts.strategy.optimizer.state[first]["sum"]
    before = _everything(parts)
    undo = StateSnapshot(parts.strategy)
    parts.strategy.try_step(next(parts.loader.epoch(1)).data)
    assert total.any()
    undo.restore()
    assert_same_bits(_everything(parts), before)
    assert first.grad is kept
    assert bool((kept == 1).all())
    assert parts.strategy.optimizer.state[first]["sum"] is total


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The points of the tiny task, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = points(1001, seed=0)
        return (data[index] for index in range(len(data)))


def _trained(
    world: World, task_options: dict[str, Any], limit: str | None, flags: dict[str, Any], is_stream: bool
) -> dict[str, Any]:
    parts = build(world, task_options, global_batch_size=128, **flags)
    if is_stream:
        how = parts.loader.share, 0, parts.task.num_draws, parts.task.augment, world.device, 0
        parts.loader = IterableLoader(Stream(), 1001, *how)
    if limit is not None:
        with _filled(limit):
            _find(parts)
    parts.strategy.warm_up(parts.loader)
    losses = steps(parts, 4)
    return {"losses": losses, "accumulate": parts.plan.accumulate, **arrays(parts.strategy.module.named_parameters())}


@pytest.mark.parametrize(
    ("size", "limit", "accumulate", "task_options", "is_stream"),
    [
        (1, "* 50", 3, {"jitter": True}, False),
        (2, "1 20", 4, {"noisy": True}, False),  # not resident
        (2, "1 20", 4, {"jitter": True}, True),
    ],
)
def test_the_run_is_that_with_the_micro_batches_set_by_hand(
    run_ranks: Ranks, size: int, limit: str, accumulate: int, task_options: dict[str, Any], is_stream: bool
) -> None:
    searched = run_ranks(_trained, size, task_options, limit, AUTO, is_stream)
    by_hand = run_ranks(_trained, size, task_options, None, {"accumulate": accumulate}, is_stream)
    for found, expected in zip(searched, by_hand, strict=True):
        assert_same_bits(found, expected)


# --- memory of the host -----------------------------------------------------------------------------------------------


class Watched(Tiny):
    """Notes the largest pass since it was last asked."""

    most = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        Watched.most = max(Watched.most, len(batch[0]))
        return super().loss(model, batch)


def test_a_size_that_could_fill_the_host_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each sample takes a hundredth of a GiB beside 3 GiB; 4 are free, so that no pass may take more than 2.
    grown = {"VmRSS": lambda: 3 * 2**30, "VmHWM": lambda: 3 * 2**30 + Watched.most * 2**30 // 100}
    monkeypatch.setattr(memory, "_own_bytes", lambda name: grown[name]())
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 4 * 2**30)
    parts = build(_world(), task_class=Watched, global_batch_size=1000, **AUTO)
    _find(parts)
    assert Watched.most == 192  # of 256, 224 and 208 more than 2 GiB are expected
    reason = "192 fits with 1.9 of 4.0 GiB, 208 is not tried: it would take about 2.1 GiB"
    assert reason in dict(parts.plan.explanation)["global batch"]


def test_the_growth_of_this_process_is_seen() -> None:
    host = memory.HostMemory(1)
    held = torch.ones(2**26)  # 256 MiB; the kernel may take cold pages of this process away meanwhile
    assert host.peak_bytes() >= 128 * 2**20
    assert len(held) == 2**26
    assert host.room_bytes // 4 <= memory.HostMemory(4).room_bytes * 2


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({}, 1000),
        ({"unified/job": ("max", "5")}, 1000),
        ({"unified/job": ("800", "500")}, 300 + 50),
        ({"unified/job": ("800", "500"), "unified": ("600", "500")}, 100 + 50),  # the group around it binds as well
        ({"unified/other": ("10", "5")}, 1000),
        ({"old/job": ("800", "700")}, 100 + 70),
    ],
)
def test_control_groups_bound_what_is_free(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, groups: dict[str, tuple[str, str]], free: int
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/job\n1:cpu:/\n0::/job\n")
    files = {
        "": (tmp_path / "unified", "memory.max", "memory.current"),
        "memory": (tmp_path / "old", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    }
    for name, numbers in groups.items():
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        _, *names = files["memory" if name.startswith("old") else ""]
        for file, number in zip(names, numbers, strict=True):
            (folder / file).write_text(number if number == "max" else str(int(number) * 1024))
        (folder / "memory.stat").write_text(f"inactive_file {50 * 1024}\n")
        if name.startswith("old"):
            (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {70 * 1024}\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_GROUP_FILES", files)
    assert memory.free_host_bytes() == free * 1024


# --- memory of a GPU --------------------------------------------------------------------------------------------------


class Wide(Tiny):
    """A sample takes about 64 MiB of activations."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 2**22), nn.ReLU(), nn.Linear(2**22, 3))


def _on_gpu(config: TrainConfig) -> tuple[Parts, World]:
    world = World(alone(), torch.device("cuda", 0))
    task = Wide()
    plan = resolve(config, resolve_layout(config, visible_gpus()[:1]), task.facts())
    strategy = Strategy(world, plan, task, config)
    share = Share(global_batch_size=plan.global_batch_size, accumulate=1, worker=0, num_workers=1)
    loader = ResidentLoader(task.train_data(), share, 0, task.num_draws, task.augment, world.device)  # type: ignore[arg-type]
    parts: Any = Parts(
        world=world,
        config=config,
        plan=plan,
        task=task,
        strategy=strategy,
        loader=loader,
        state=None,  # type: ignore[arg-type]
    )
    return parts, world


@pytest.mark.gpu
def test_a_gpu_that_runs_full_cuts_the_batch_and_training_goes_on() -> None:
    flags = {"batch_size": "auto", "global_batch_size": 1000, "num_gpus": 1, "precision": "fp32"}
    parts, world = _on_gpu(make_config(flags, None))
    torch.cuda.set_per_process_memory_fraction(0.1, world.device)
    try:
        _find(parts)
        assert 1 < parts.plan.accumulate < 1000
        assert torch.cuda.memory_reserved(world.device) < 2 * 2**30  # what was tried is given back
        assert not parts.strategy.optimizer.state
        for batch in parts.loader.epoch(1):
            parts.strategy.micro_step(batch)
            if batch.span.is_last:
                parts.strategy.step(0.01)
                break
        assert torch.cuda.max_memory_reserved(world.device) <= 0.1 * torch.cuda.mem_get_info(world.device)[1]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, world.device)


@pytest.mark.gpu
def test_a_gpu_keeps_a_tenth_free() -> None:
    gpu = memory.GpuMemory([torch.device("cuda", 0)], 1)
    free, total = torch.cuda.mem_get_info(0)
    assert 0 < gpu.room_bytes <= total
    assert gpu.is_enough(int(0.89 * gpu.room_bytes))
    assert not gpu.is_enough(int(0.91 * gpu.room_bytes))
    assert memory.GpuMemory([torch.device("cuda", 0)], 2).room_bytes < gpu.room_bytes - free // 3


# The global batch is that of `SETTINGS`' 64 for each of two workers, at a rate that does not depend on how it is said.
RATE = ["--num-gpus", "2", "--lr-rule", "none", "--warmup-epochs", "0"]
AUTO_FLAGS = [*RATE, "--batch-size", "auto", "--global-batch-size", "128"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of two workers, the second of which has memory for 20 samples only."""
    folder = tmp_path_factory.mktemp("auto")
    done = in_ranks(folder, *AUTO_FLAGS, "--run-name", "auto", TINY_MEMORY="1 20")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "auto", done


def test_the_batch_is_cut_into_passes_that_fit_and_the_plan_says_why(
    searched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, done = searched
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("global batch"))
    assert "20 fits with " in line
    assert line.endswith(" GiB, 22 does not) × 2 workers")
    result = summary(run)
    assert (result["global_batch_size"], result["micro_batch_size"], result["accumulate"]) == (128, 16, 4)
    assert "batch size" in result["setup_parts_s"]
    batch = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["batch"]
    assert (batch["batch_size"], batch["global_batch_size"], batch["accumulate"]) == ("auto", 128, 1)


def test_a_resume_keeps_the_batch_and_searches_anew(
    searched: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, _ = searched
    done = in_ranks(run.parents[1], *AUTO_FLAGS, "--resume", "auto", "--epochs", "3")  # with all memory there is
    assert done.returncode == 0, done.stderr
    assert "128 as before = 1 micro-batch of 64 (auto: 64 fits with " in done.stdout
    result = summary(run)
    assert (result["global_batch_size"], result["accumulate"], result["num_resumes"]) == (128, 1, 1)
    assert result["steps"] == 24


def test_a_dry_run_says_when_the_passes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TASK, *RATE, "--batch-size", "auto", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "64 (32 for each of 2 workers), in micro-batches that --batch-size auto finds once the workers" in printed


@pytest.mark.parametrize(("precision", "expected"), [("bf16", "ieee"), ("fp32", "tf32")])
def test_choices_of_the_search_are_kept_apart_in_16_bits(
    precision: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    parts, seen = build(_world(), precision=precision, **AUTO), set[tuple[str, bool]]()
    loss = parts.task.loss

    def noted(model: Any, batch: Any) -> Any:
        seen.add((conv.fp32_precision, torch.backends.cudnn.benchmark))
        return loss(model, batch)

    before, conv.fp32_precision = conv.fp32_precision, "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(parts.task, "loss", noted)
    try:
        _find(parts)
        assert conv.fp32_precision == "tf32"
    finally:
        conv.fp32_precision = before
    assert seen == {(expected, False)}
