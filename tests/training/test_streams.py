"""Training and validation over streams: as over the same samples found by their index, on any number of ranks."""

from __future__ import annotations

import copy
import itertools
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.data.loaders import IterableLoader, Share
from stormo.data.order import derive_seed, epoch_order
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel.table import strategy_class
from stormo.training.sanity_check import check_streams
from stormo.training.state import Progress, RunState
from stormo.training.trainer import make_batch, make_loader
from stormo.training.validation import Validation
from tests import programs
from tests.stream_task import InOrder, Streamed, StreamOptions
from tests.tiny_run import Parts, arrays, assert_same_bits, steps, whole_state

Ranks = Callable[..., list[Any]]
FLAGS = {
    "warmup_epochs": 0.0,
    "lr_rule": "none",
    "base_lr": 0.1,
    "loader_workers": 0,
    "precision": "fp64",
    "global_batch_size": 16,
}


def _build(world: World, task_options: dict[str, Any], flags: dict[str, Any]) -> Parts:
    config = options.make_config(FLAGS | {"num_gpus": world.size} | flags, None)
    task = Streamed(StreamOptions(num_train=37, **task_options))
    plan = resolve(config, resolve_layout(config, ()), task.facts())
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(derive_seed(config.run.seed, "model"))
    strategy = strategy_class(plan.layout)(world, plan, task, config)
    return Parts(
        world=world,
        config=config,
        plan=plan,
        task=task,
        strategy=strategy,
        loader=make_loader(config, plan, task, world),
        state=RunState(
            progress=Progress(), strategy=strategy, loss_sum=torch.zeros((), dtype=torch.float64, device=world.device)
        ),
    )


def _train(world: World, task_options: dict[str, Any], flags: dict[str, Any], num_steps: int) -> dict[str, Any]:
    parts = _build(world, task_options, flags)
    parts.strategy.warm_up(parts.loader)
    losses = steps(parts, num_steps)
    return {"losses": np.array(losses), **whole_state(parts)}


@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (2, 1), (3, 2)])
def test_a_stream_trains_as_the_same_samples_by_their_index_to_the_last_bit(
    run_ranks: Ranks, size: int, accumulate: int
) -> None:
    flags = {"accumulate": accumulate}
    streamed = run_ranks(_train, size, {}, flags, 7)  # 16, 16, 5: two whole epochs and a step
    by_index = run_ranks(_train, size, {"is_map": True}, flags, 7)
    (expected,) = run_ranks(_train, 1, {"is_map": True}, {}, 7)
    for ours, theirs in zip(streamed, by_index, strict=True):
        assert_same_bits(ours, theirs)
        for name in ("losses", "0.weight", "2.bias"):
            np.testing.assert_allclose(ours[name], expected[name], rtol=1e-12, atol=1e-12)


def test_a_stream_without_a_length_trains_the_same_on_any_number_of_ranks(run_ranks: Ranks) -> None:
    task_options, flags = {"says_length": False}, {"epoch_samples": 21}
    (expected,) = run_ranks(_train, 1, task_options, flags, 9)  # 16, 5: four epochs over 84 of 37 samples a pass
    for ranked in run_ranks(_train, 3, task_options, flags, 9):
        for name in ("losses", "0.weight", "2.bias"):
            np.testing.assert_allclose(ranked[name], expected[name], rtol=1e-12, atol=1e-12)


def _whole_and_resumed(world: World, task_options: dict[str, Any], flags: dict[str, Any], at: int) -> tuple[Any, Any]:
    whole = _build(world, task_options, flags)
    whole.strategy.warm_up(whole.loader)
    steps(whole, at)
    snapshot = copy.deepcopy(whole.state.snapshot(world, 0))  # it shares the memory of the model
    steps(whole, 6)
    resumed = _build(world, task_options, flags)
    resumed.strategy.warm_up(resumed.loader)
    resumed.state.restore_snapshot(world, snapshot, 0)
    steps(resumed, 6)
    assert whole.state.progress.sample_order_sha256 == resumed.state.progress.sample_order_sha256
    return whole_state(whole), whole_state(resumed)


@pytest.mark.parametrize(("at", "has_length"), [(1, True), (5, True), (4, False)])
def test_a_run_resumed_in_the_middle_of_a_stream_is_the_whole_run(run_ranks: Ranks, at: int, has_length: bool) -> None:
    task_options: dict[str, Any] = {"says_length": has_length, "own_optimizer": True}
    flags = {} if has_length else {"epoch_samples": 30}
    for whole, resumed in run_ranks(_whole_and_resumed, 2, task_options, flags, at):
        assert_same_bits(whole, resumed)


# --- validation -------------------------------------------------------------------------------------------------------


def _validate(world: World, task_options: dict[str, Any], batch_size: int, epochs: int = 2) -> list[Any]:
    task = Streamed(StreamOptions(**task_options))
    torch.manual_seed(0)
    model = task.model()
    data = task.validation_data()
    validation = Validation(task, data, batch_size, world, make_batch=make_batch(task))
    found = []
    next(iter(validation.run(model, nullcontext)))  # given up after the first round, as the sanity check does
    for _ in range(epochs):
        *rounds, metrics = validation.run(model, nullcontext)
        assert rounds == [None] * (validation.num_rounds - 1)
        assert not any(metric._is_synced for metric in (task.f1, task.auroc))
        found.append(metrics)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert validation.num_samples == task.options.num_validation
    return found


MAP, STREAM, NO_LENGTH = {"is_map": True}, dict[str, bool](), {"says_length": False}


@pytest.mark.parametrize(
    ("size", "num_validation", "kinds"),
    [
        pytest.param(1, 101, [STREAM], id="alone"),
        pytest.param(3, 101, [MAP, STREAM], id="uneven batches"),  # 4, 4 and 3, the last one with a single sample
        pytest.param(3, 15, [MAP, NO_LENGTH], id="a rank without a batch"),
        pytest.param(3, 60, [STREAM, NO_LENGTH], id="even batches"),
    ],
)
def test_every_metric_is_that_of_all_samples_on_any_number_of_ranks(
    run_ranks: Ranks, size: int, num_validation: int, kinds: list[dict[str, bool]]
) -> None:
    batch_size = 10
    task_options = {"num_validation": num_validation}
    world = World(alone(), torch.device("cpu"))
    expected = _validate(world, {"is_map": True, **task_options}, batch_size)
    # All samples as one batch: what the metrics are by definition.
    by_definition = _validate(world, {"is_map": True, **task_options}, num_validation)
    assert expected[0] != expected[1]
    results = [one for kind in kinds for one in run_ranks(_validate, size, {**kind, **task_options}, batch_size)]
    for ranked in results:
        for metrics, exact, one in zip(ranked, expected, by_definition, strict=True):
            assert sorted(metrics) == ["accuracy", "auroc", "f1", "loss"]
            assert (metrics["loss"], metrics["accuracy"]) == (exact["loss"], exact["accuracy"])  # to the last bit
            assert metrics["f1"] == exact["f1"]  # made of counts
            # Padding depends on the batch, and by it the last bits of the probabilities.
            assert metrics["auroc"] == pytest.approx(exact["auroc"], rel=1e-6)
            assert metrics == pytest.approx(one, rel=1e-5)


class _Nothing(Streamed):
    def validation_data(self) -> Any:
        return _Empty()


class _Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_an_empty_validation_stream_is_refused() -> None:
    task = _Nothing()
    validation = Validation(task, task.validation_data(), 10, World(alone(), torch.device("cpu")))
    with pytest.raises(SettingError, match="a task without validation samples was given"):
        list(validation.run(task.model(), nullcontext))


# --- the task's own optimizer -----------------------------------------------------------------------------------------


def _rates(world: World) -> Any:
    parts = _build(world, {"own_optimizer": True}, {"base_lr": 0.01, "momentum": 0.3})
    strategy = parts.strategy
    strategy.warm_up(parts.loader)
    seen = []
    for rate in (0.004, 0.0):
        for parameter in strategy.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        strategy.step(rate)
        seen.append([group["lr"] for group in strategy.optimizer.param_groups])
    steps(parts, 3)
    return seen, strategy.lr_factor, strategy.warnings, arrays(strategy.module.named_parameters())


def test_an_own_optimizer_keeps_the_ratio_of_its_rates(run_ranks: Ranks) -> None:
    (alone_run,) = run_ranks(_rates, 1)
    for seen, factor, warnings, weights in run_ranks(_rates, 2):
        assert seen == [[0.004, pytest.approx(0.001)], [0.0, 0.0]]
        assert factor == pytest.approx(0.4)  # the first group's 0.004 for a --base-lr of 0.01
        assert warnings == [
            "The run uses the task's own Adam, not --optimizer: its learning rates 0.004, 0.001 are for one worker's "
            "batch, × 1 for the global batch; warm-up and decay are those of the plan. --momentum has no effect."
        ]
        for name, value in weights.items():
            np.testing.assert_allclose(value, alone_run[3][name], rtol=1e-9, atol=1e-9)


# --- the whole command ------------------------------------------------------------------------------------------------


def test_a_stream_trains_by_the_command_with_an_optimizer_and_metrics_of_its_own(tmp_path: Path) -> None:
    task = str(Path(__file__).parent.with_name("stream_task.py"))
    settings = ["--epoch-samples", "150", "--batch-size", "16", "--epochs", "2", "--no-tensorboard", "--num-gpus", "2"]
    own = ["--task.own-optimizer", "--warmup-epochs", "0", "--run-name", "whole", "--no-task.says-length"]
    done = programs.run(["-m", "stormo", "train", task, *settings, *own], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert "a stream in its own order; every worker reads it with one loader process" in done.stdout
    assert "an epoch is 150 samples, and the next one continues there" in done.stdout
    rate = "learning rate  of the task's optimizer() × 2 (linear)\n"
    assert f"\noptimizer      the task's own Adam\n{rate}" in done.stdout
    assert "Validation Auroc = " in done.stdout
    events = [json.loads(line) for line in (tmp_path / "runs/whole/events.jsonl").read_text().splitlines()]
    rates = [event["learning_rate"] for event in events if "train_loss" in event]
    assert rates == [0.008, 0.008]  # the first group's, for two workers


class _Sharded(InOrder):
    """Every worker reads a part of its own."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), dist.get_rank(), None, dist.get_world_size())


class _Unseeded(InOrder):
    """Draws an order that nobody can know."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=lambda one: secrets.randbelow(2**30)))


class _Reading(Streamed):
    """Reads training or validation data by one of these."""

    train: Any = InOrder
    validation: Any = InOrder

    def train_data(self) -> Any:
        return self.train(24, shuffled=True)

    def validation_data(self) -> Any:
        return self.validation(24, shuffled=False)


class _ShardsTraining(_Reading):
    train = _Sharded


class _ShardsValidation(_Reading):
    validation = _Sharded


class _Shuffles(_Reading):
    train = _Unseeded


def _same_streams(world: World, kind: type[Streamed]) -> str:
    task = kind(StreamOptions())
    share = Share(global_batch_size=8, accumulate=1, worker=world.data.rank, num_workers=world.data.size)
    how = (share, 0, task.num_draws, task.augment, world.device, 0, task.collate)
    loader = IterableLoader(task.train_data(), 24, *how)
    validation = Validation(task, task.validation_data(), 8, world, make_batch=task.collate)
    try:
        check_streams(task, world, loader, validation)
    except SettingError as error:
        return str(error)
    # It is read from its beginning afterwards.
    first = next(loader.epoch(1)).data["points"]["index"].tolist()
    expected = epoch_order(24, 0, 1)[:8].tolist()
    return "" if kind is _Shuffles or first == expected[4 * world.rank :][:4] else f"read {first}"


def test_a_stream_of_which_every_worker_reads_another_part_is_refused_by_all(run_ranks: Ranks) -> None:
    for kind, method in ((_ShardsTraining, "train_data"), (_ShardsValidation, "validation_data")):
        results = run_ranks(_same_streams, 2, kind)
        assert all(f"{method}() gave a stream" in result and "rank" in result for result in results)
    for kind in (_Reading, _Shuffles):
        assert run_ranks(_same_streams, 2, kind) == ["", ""]
