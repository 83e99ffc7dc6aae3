"""The gradient noise scale as a run measures it: true where the truth is known, and without a trace in the training."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve, with_micro_batches
from stormo.config.schema import TrainConfig
from stormo.data import TensorData
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.optim.noise_scale import NUM_MOMENTS
from stormo.parallel.gradient_noise import total_norm
from tests.tiny_run import assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
NUM_TRAIN, DIM = 240, 12


class Quadratic(Tiny):
    """Half the squared distance of a point to every sample: its gradient is that point minus the sample."""

    def model(self) -> nn.Module:
        class Point(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.at = nn.Parameter(torch.zeros(DIM))
                self.far = nn.Parameter(torch.zeros(3))  # is never moved, but travels

            def forward(self, x: Tensor) -> Tensor:
                return x.to(self.at.dtype) - self.at + 0.0 * self.far.sum()

        return Point()

    def train_data(self) -> Any:
        return TensorData(samples())

    def validation_data(self) -> Any:
        return TensorData(samples())

    def augment(self, batch: Any, draws: Tensor) -> Any:
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        distances: Tensor = model(batch[0]).float().square().sum(dim=1)
        return 0.5 * distances.mean()


def samples() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_TRAIN, DIM, generator=generator) * torch.linspace(0.5, 2.0, DIM) + 0.6


def truth() -> tuple[float, float]:
    """What is estimated without bias when samples are drawn without repeating one."""
    x = samples().double()
    trace = float((x - x.mean(dim=0)).square().sum() / (NUM_TRAIN - 1))
    return trace, float(x.mean(dim=0).square().sum()) - trace / NUM_TRAIN


def _measure(world: World, num_steps: int, flags: dict[str, Any]) -> list[float]:
    parts = build(world, task_class=Quadratic, **{"base_lr": 1e-12, "momentum": 0.0, **flags})
    parts.strategy.warm_up(parts.loader)
    steps(parts, num_steps)
    assert parts.strategy.noise_scale is not None
    moments = parts.strategy.noise_scale.collect_moments()
    found = parts.strategy.noise_scale.read()
    trace, square = truth()
    assert found.low is not None
    assert found.high is not None
    width = found.high - found.low  # the truth may lie beyond the range once in twenty times, but not far
    assert found.low - width < trace / square < found.high + width
    assert found.high < 3 * found.low
    return moments


def _check(moments: list[float]) -> None:
    """Both means lie within four of their own spreads of the truth, which are small."""
    weight, weight_2, *sums = moments
    trace, square, trace_2, _, square_2 = (value / weight for value in sums)
    num_blocks = weight**2 / weight_2
    for found, found_2, expected in zip((trace, square), (trace_2, square_2), truth(), strict=True):
        spread = math.sqrt((found_2 - found**2) / (num_blocks - 1))
        assert spread < 0.2 * expected
        assert abs(found - expected) < 4 * spread


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(3, {"global_batch_size": 7}, id="unequal shares"),  # 2, 2, 3 and at the end of an epoch 2
        pytest.param(3, {"global_batch_size": 7, "accumulate": 2, "clip_norm": 0.1}, id="workers that accumulate"),
        pytest.param(1, {"global_batch_size": 11, "accumulate": 3}, id="unequal micro-batches"),
        pytest.param(2, {"global_batch_size": 8, "precision": "fp16"}, id="loss scale"),
        pytest.param(2, {"global_batch_size": 8, "precision": "fp16", "clip_norm": 0.1}, id="unscaled for clipping"),
        pytest.param(2, {"global_batch_size": 8, "gradient_noise": 1.0}, id="before noise is added"),
    ],
)
def test_the_measured_scale_is_close_to_the_known_one(run_ranks: Ranks, size: int, flags: dict[str, Any]) -> None:
    found = run_ranks(_measure, size, 240, flags)
    _check(found[0])
    assert all(moments == found[0] for moments in found)


def test_the_factors_of_the_samples_are_removed(run_ranks: Ranks) -> None:
    for moments in run_ranks(_measure, 2, 400, {"global_batch_size": 16, "gradient_noise_batch": 8}):
        _check(moments)


def _train(world: World, measures: bool, flags: dict[str, Any]) -> dict[str, Any]:
    parts = build(world, {"num_train": 37, "norm": False}, global_batch_size=16, noise_scale=measures, **flags)
    assert (parts.strategy.noise_scale is not None) is measures
    parts.strategy.warm_up(parts.loader)
    steps(parts, 12)
    return whole_state(parts)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, {"accumulate": 2}),
        (3, {"optimizer": "adamw", "clip_norm": 0.1}),
        (3, {"accumulate": 2, "precision": "bf16"}),
        (2, {"precision": "fp16"}),
    ],
    ids=str,
)
def test_measuring_does_not_change_a_bit_of_the_training(run_ranks: Ranks, size: int, flags: dict[str, Any]) -> None:
    quiet, measured = run_ranks(_train, size, False, flags), run_ranks(_train, size, True, flags)
    for one, other in zip(quiet, measured, strict=True):
        assert_same_bits(one, other)


def _resume(world: World) -> None:
    flags: dict[str, Any] = {"task_class": Quadratic, "global_batch_size": 7}
    parts = build(world, **flags)
    steps(parts, 21)  # in the middle of a block
    snapshot = parts.state.snapshot(world, 0)
    resumed = build(world, **flags)
    resumed.state.restore_snapshot(world, snapshot, 0)
    steps(parts, 30)
    steps(resumed, 30)
    assert parts.strategy.noise_scale is not None
    assert resumed.strategy.noise_scale is not None
    found = parts.strategy.noise_scale.collect_moments()
    # DDP lays its buckets out anew after a resume, so norms over them are summed in another order.
    assert resumed.strategy.noise_scale.collect_moments() == pytest.approx(found, rel=1e-6)
    assert found[0] == pytest.approx(sum((1 - 1 / 512) ** age for age in range(51)), rel=0.02)  # all steps count
    unmeasured = build(world, noise_scale=False, **flags)
    unmeasured.state.restore_snapshot(world, parts.state.snapshot(world, 0), 0)  # what is not wanted is left aside
    resumed.state.restore_snapshot(world, unmeasured.state.snapshot(world, 0), 0)


def test_a_resumed_run_measures_as_one_that_never_stopped(run_ranks: Ranks) -> None:
    run_ranks(_resume, 2)


def _saved(world: World) -> bytes:
    parts = build(world, task_class=Quadratic, global_batch_size=8, base_lr=1e-12, momentum=0.0)
    steps(parts, 101)
    return pickle.dumps(parts.state.snapshot(world, 0))


def test_one_worker_resumes_the_measurement_of_two(run_ranks: Ranks) -> None:
    snapshot = pickle.loads(run_ranks(_saved, 2)[0])
    world = World(alone(), torch.device("cpu"))
    parts = build(world, task_class=Quadratic, global_batch_size=8, accumulate=4, base_lr=1e-12, momentum=0.0)
    parts.state.restore_snapshot(world, snapshot, 0)
    meter = parts.strategy.noise_scale
    assert meter is not None
    before = meter.collect_moments()
    assert before == snapshot.state["noise_scale"]
    assert before[0] > 90
    steps(parts, 300)
    after = meter.collect_moments()
    assert after[0] > before[0] + 20
    _check(after)


def test_steps_that_overflow_are_not_measured() -> None:
    world = World(alone(), torch.device("cpu"))
    parts = build(world, task_class=Quadratic, global_batch_size=8, accumulate=2, precision="fp16")
    strategy = parts.strategy
    for step in range(24):
        if step % 3 == 0:
            strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), "scale": 1e38})
        steps(parts, 1)
        strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), "scale": 1024.0})
    assert strategy.noise_scale is not None
    moments = strategy.noise_scale.collect_moments()
    assert all(math.isfinite(value) for value in moments)
    assert moments[0] == pytest.approx(16, rel=0.05)


def test_warm_up_is_not_measured() -> None:
    world = World(alone(), torch.device("cpu"))
    parts = build(world, task_class=Quadratic, global_batch_size=8, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    parts.strategy.try_step(next(iter(parts.loader.epoch(1))).data)
    assert parts.strategy.noise_scale is not None
    assert parts.strategy.noise_scale.collect_moments() == [0.0] * NUM_MOMENTS


def test_every_step_of_a_start_is_measured_then_one_in_eight() -> None:
    parts = build(World(alone(), torch.device("cpu")), task_class=Quadratic, global_batch_size=8, accumulate=2)
    assert parts.strategy.noise_scale is not None
    counts = []
    for step in (120, 128):
        parts.state.progress.step = step
        parts.strategy.noise_scale.load_moments([0.0] * NUM_MOMENTS)
        steps(parts, 8)
        counts.append(parts.strategy.noise_scale.collect_moments()[0])
    assert counts == [8.0, 1.0]


class Low(Quadratic):
    """The same with weights of 16 bits, whose norms have 8 bits where they are not asked for more."""

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)


@pytest.mark.parametrize("flags", [{}, {"clip_norm": 0.1}, {"gradient_noise": 0.01}], ids=str)
def test_norms_of_16_bit_gradients_have_32(flags: dict[str, Any]) -> None:
    world = World(alone(), torch.device("cpu"))
    parts = build(world, task_class=Low, global_batch_size=8, accumulate=2, base_lr=1e-12, **flags)
    first, second = list(parts.loader.epoch(1))[:2]
    parts.strategy.micro_step(first)
    expected = [_norm(parts.strategy.module)]
    parts.strategy.micro_step(second)
    expected.append(_norm(parts.strategy.module))
    parts.strategy.step(1e-12)
    meter = parts.strategy.noise_scale
    assert meter is not None
    ((own, whole, _),) = meter._block
    assert [float(own), float(whole)] == pytest.approx(expected, rel=1e-6)
    meter.begin(first.span, 2, 0.0, 0)
    piece = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    meter.update(piece)
    assert float(meter._norms[0]) == pytest.approx(float(piece.double().norm()), rel=1e-6)


def _norm(module: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None))


def test_the_norm_of_mixed_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
    gradients = [torch.randn(30, 7, generator=generator).to(dtype) for dtype in dtypes]
    expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert float(total_norm(gradients)) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(total_norm(gradients[2:3]), nn.utils.get_total_norm(gradients[2:3]))


# --- the plan ---------------------------------------------------------------------------------------------------------


def _config(**flags: Any) -> TrainConfig:
    return options.make_config({"num_gpus": 1, "device": "cpu", **flags}, None)


def _plan(config: TrainConfig) -> Plan:
    return resolve(config, resolve_layout(config, ()), Facts(num_train=1000, num_validation=10))


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [({"num_gpus": 3}, True), ({"num_gpus": 3, "noise_scale": False}, False), ({"accumulate": 2}, True), ({}, False)],
)
def test_it_is_measured_if_that_costs_nothing(flags: dict[str, Any], is_on: bool) -> None:
    plan = _plan(_config(**flags))
    assert plan.noise_scale is is_on
    assert dict(plan.explanation)["noise scale"] == f"{'on' if is_on else 'off'}: {plan.noise_scale_reason}"


def test_one_micro_batch_of_one_worker_cannot_be_measured() -> None:
    with pytest.raises(SettingError, match="--noise-scale was set"):
        _plan(_config(noise_scale=True))
    config = _config(noise_scale=True, batch_size="auto")
    plan = _plan(config)  # the number of micro-batches is not known yet
    assert not plan.noise_scale
    assert with_micro_batches(config, plan, 2, "found", None).noise_scale
    with pytest.raises(SettingError, match="--noise-scale was set"):
        with_micro_batches(config, plan, 1, "found", None)
