"""Gradient noise in a run: every sample's own, however many workers and passes, and after any resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.data.order import derive_seed
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.optim.noise import add_noise, annealed_sigma, sample_factors
from stormo.system.hardware import Gpu
from tests.optim.test_noise import whole_chunks
from tests.tiny_run import Parts, arrays, assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
PLAIN: dict[str, Any] = {"num_train": 37, "dropout": 0.0, "norm": False}
EXACT: dict[str, Any] = {"precision": "fp64", "global_batch_size": 16}


def _alone(task_options: dict[str, Any], task_class: type[Tiny] = Tiny, **flags: Any) -> Parts:
    return build(World(alone(), torch.device("cpu")), task_options, task_class=task_class, **flags)


def _gradients(parts: Parts) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in parts.strategy.module.named_parameters() if p.grad is not None}


def _factors(parts: Parts, span: Any, epoch: int = 1) -> Tensor:
    seed = derive_seed(parts.config.run.seed, "gradient noise", epoch, span.step_start)
    small = parts.config.optimizer.gradient_noise_batch
    assert small is not None
    return sample_factors(span.step_samples, small, seed)


# --- factors ----------------------------------------------------------------------------------------------------------


class TwoOutputs(Tiny):
    """A model that returns its hidden units beside what it makes of them, and a loss of both."""

    def model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)

            def forward(self, x: Tensor) -> dict[str, Any]:
                hidden = self.first(x).tanh()
                return {"hidden": (hidden, hidden), "logits": self.second(hidden), "mask": x > 0, "name": "two"}

        return Model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.per_sample(model, batch).mean()

    def per_sample(self, model: nn.Module, batch: Any) -> Tensor:
        """The model is asked twice, as for two views of a sample, and once more as its own teacher."""
        x, y = batch
        x = x.double()
        with torch.no_grad():
            target = model(x)["hidden"][0]
        out, other = model(x), model(-x)
        near = (out["hidden"][0] - target + other["hidden"][1]).square().sum(dim=1)
        total: Tensor = cross_entropy(out["logits"], y, reduction="none") + 0.1 * near
        return total


class Weighted(Tiny):
    """The tiny task, also with a loss for every sample."""

    def per_sample(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x.double()), y, reduction="none")


@pytest.mark.parametrize("task_class", [Weighted, TwoOutputs])
def test_factors_weight_the_losses_of_the_samples_exactly(task_class: Any) -> None:
    parts = _alone({"dropout": 0.0, "num_train": 16}, task_class, gradient_noise_batch=4, **EXACT)
    (batch,) = parts.loader.epoch(1)
    parts.strategy.micro_step(batch)
    found = _gradients(parts)
    parts.strategy.optimizer.zero_grad()
    module, task = parts.strategy.module, parts.task
    assert isinstance(task, task_class)
    (_factors(parts, batch.span) * task.per_sample(module, batch.data)).mean().backward()
    weighted = _gradients(parts)
    parts.strategy.optimizer.zero_grad()
    task.loss(module, batch.data).backward()
    for name, gradient in _gradients(parts).items():
        torch.testing.assert_close(found[name], weighted[name], rtol=1e-12, atol=1e-14)
        if name.endswith("weight"):  # norms take the gradient of a bias before them away
            assert not torch.allclose(found[name], gradient, rtol=0.05)
    assert not module._forward_hooks  # nothing of it stays for validation


def test_a_short_last_batch_has_the_noise_of_its_own_size() -> None:
    parts = _alone(PLAIN, Weighted, gradient_noise_batch=4, **EXACT)
    last = list(parts.loader.epoch(1))[-1]
    assert last.span.num_samples == 5
    parts.strategy.micro_step(last)
    found = _gradients(parts)
    parts.strategy.optimizer.zero_grad()
    (_factors(parts, last.span) * parts.task.per_sample(parts.strategy.module, last.data)).mean().backward()  # type: ignore[attr-defined]
    for name, gradient in _gradients(parts).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
    assert float(_factors(parts, last.span).std()) < 1.5  # sigma is 0.5 here and 1.7 in the others


def _train(world: World, flags: dict[str, Any], num_steps: int) -> dict[str, Any]:
    parts = build(world, PLAIN, **EXACT, **flags)
    losses = steps(parts, num_steps)
    return {"losses": np.array(losses), **arrays(parts.strategy.module.named_parameters())}


@pytest.mark.parametrize("noise", [{"gradient_noise_batch": 4}, {"gradient_noise": 0.01}], ids=["factors", "added"])
def test_any_number_of_workers_and_micro_batches_has_the_same_noise(run_ranks: Ranks, noise: dict[str, Any]) -> None:
    (expected,) = run_ranks(_train, 1, noise, 7)
    (quiet,) = run_ranks(_train, 1, {}, 7)
    assert not np.allclose(expected["0.weight"], quiet["0.weight"], rtol=1e-2)
    for size, accumulate in ((1, 2), (3, 1), (3, 2)):
        for found in run_ranks(_train, size, noise | {"accumulate": accumulate}, 7):
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def _resume(world: World, flags: dict[str, Any]) -> None:
    expected = build(world, PLAIN, **flags)
    steps(expected, 5)  # of three in an epoch
    parts = build(world, PLAIN, **flags)
    steps(parts, 4)
    snapshot = parts.state.snapshot(world, 0)
    resumed = build(world, PLAIN, **flags)
    resumed.state.restore_snapshot(world, snapshot, 0)
    steps(resumed, 1)
    assert_same_bits(whole_state(resumed), whole_state(expected))


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_has_the_noise_of_one_that_never_stopped(run_ranks: Ranks, size: int) -> None:
    run_ranks(_resume, size, {"global_batch_size": 16, "gradient_noise_batch": 4, "gradient_noise": 0.01})


def test_epochs_and_steps_differ_in_their_noise() -> None:
    parts = _alone(PLAIN, gradient_noise_batch=4, **EXACT)
    spans = [batch.span for batch in parts.loader.epoch(1)]
    assert not torch.equal(_factors(parts, spans[0]), _factors(parts, spans[1]))
    batch = next(iter(parts.loader.epoch(1)))
    found = []
    for epoch in (1, 2):
        parts.state.progress.epoch = epoch
        parts.strategy.micro_step(batch)
        found.append(_gradients(parts)["0.weight"])
        parts.strategy.optimizer.zero_grad()
    assert not torch.allclose(found[0], found[1], rtol=1e-2)


def test_factors_are_drawn_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []

    def count(num_samples: int, small_batch: int, seed: int) -> Tensor:
        drawn.append((num_samples, seed))
        return sample_factors(num_samples, small_batch, seed)

    monkeypatch.setattr("stormo.parallel.gradient_noise.sample_factors", count)
    parts = _alone(PLAIN, gradient_noise_batch=4, accumulate=3, **EXACT)
    steps(parts, 4)  # of three in an epoch
    assert [size for size, _ in drawn] == [16, 16, 5, 16]
    assert len({seed for _, seed in drawn}) == 4
    # A batch that has grown may begin where the one before it began.
    parts.state.progress.epoch, parts.state.progress.position = 2, 0
    parts.loader.share = replace(parts.loader.share, global_batch_size=32)
    steps(parts, 1)
    assert [size for size, _ in drawn[4:]] == [32]


def test_a_compiled_model_and_16_bits_have_the_factors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: real(model, dynamic=dynamic, backend="eager"))
    flags: dict[str, Any] = {"gradient_noise_batch": 4, "global_batch_size": 16}
    expected, compiled = _alone(PLAIN, **flags), _alone(PLAIN, compile=True, **flags)
    assert type(compiled.strategy._model).__name__ == "OptimizedModule"
    steps(expected, 4)
    steps(compiled, 4)
    assert_same_bits(
        arrays(compiled.strategy.module.named_parameters()), arrays(expected.strategy.module.named_parameters())
    )
    low = _alone(PLAIN, precision="bf16", **flags)
    steps(low, 4)
    for name, value in arrays(low.strategy.module.named_parameters()).items():
        np.testing.assert_allclose(value, arrays(expected.strategy.module.named_parameters())[name], atol=0.05)


class Returning(Tiny):
    """Returns whatever a test wants to be refused."""

    change: Callable[[Tensor], Any]

    def model(self) -> nn.Module:
        change = type(self).change

        class Model(nn.Linear):
            def forward(self, x: Tensor) -> Any:
                return change(super().forward(x))

        return Model(8, 3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0].double())
        return out.mean() if isinstance(out, Tensor) else torch.zeros((), requires_grad=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: out.mean(), "returned a tensor of a single number for 16 samples"),
        (lambda out: out.T, "returned a tensor of 3x16 for 16 samples"),
        (lambda out: (out, {"loss": out.sum()}), "returned a tensor of a single number in [1]['loss'] for 16 samples"),
        (lambda out: out.detach(), "returned a Tensor in which there is no tensor that has a gradient"),
        (lambda out: object(), "returned a object in which"),
    ],
)
def test_an_output_without_a_row_for_each_sample_is_refused(change: Any, said: str) -> None:
    task_class = type("Changed", (Returning,), {"change": staticmethod(change)})
    parts = _alone({"num_train": 16}, task_class, gradient_noise_batch=4, **EXACT)
    with pytest.raises(SettingError) as refused:
        parts.strategy.micro_step(next(iter(parts.loader.epoch(1))))
    assert said in str(refused.value)


def test_a_loss_that_does_not_call_the_model_is_refused() -> None:
    class Around(Tiny):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return cross_entropy(model.forward(batch[0].double()), batch[1])

    parts = _alone({"num_train": 16}, Around, gradient_noise_batch=4, **EXACT)
    with pytest.raises(SettingError, match=r"loss\(\) did not call the model"):
        parts.strategy.micro_step(next(iter(parts.loader.epoch(1))))


# --- what is added ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_noise_is_added_to_what_was_unscaled_and_clipped(precision: str) -> None:
    flags: dict[str, Any] = {"global_batch_size": 16, "momentum": 0.0, "clip_norm": 1e-3, "precision": precision}
    quiet, noisy = _alone(PLAIN, **flags), _alone(PLAIN, gradient_noise=0.04, gradient_noise_decay=0.5, **flags)
    for step in range(2):
        before = arrays(noisy.strategy.module.named_parameters())
        quiet.strategy.module.load_state_dict(noisy.strategy.module.state_dict())
        steps(quiet, 1)
        steps(noisy, 1)
        shifts = [
            torch.from_numpy(value - arrays(noisy.strategy.module.named_parameters())[name]) / 0.1
            for name, value in arrays(quiet.strategy.module.named_parameters()).items()
        ]
        expected = [torch.zeros_like(shift) for shift in shifts]
        add_noise(whole_chunks(expected), annealed_sigma(0.04, 0.5, step), derive_seed(0, "added noise", step))
        for shift, drawn in zip(shifts, expected, strict=True):
            torch.testing.assert_close(shift, drawn, rtol=1e-3, atol=1e-5)
        moved = [value - before[name] for name, value in arrays(quiet.strategy.module.named_parameters()).items()]
        assert sum(float((move**2).sum()) for move in moved) ** 0.5 <= 0.1 * 1.01e-3  # the gradient stays clipped


def test_a_step_that_overflows_is_skipped_with_its_noise() -> None:
    parts = _alone(PLAIN, global_batch_size=16, precision="fp16", gradient_noise=0.04)
    before = arrays(parts.strategy.module.named_parameters())
    parts.strategy.scaler.load_state_dict({**parts.strategy.scaler.state_dict(), "scale": 1e30})
    steps(parts, 1)
    assert_same_bits(arrays(parts.strategy.module.named_parameters()), before)


# --- the plan ---------------------------------------------------------------------------------------------------------

GPU = Gpu(name="NVIDIA H200", memory_bytes=140 * 2**30, capability=(9, 0))
FACTS = Facts(num_train=60000, num_validation=10000, train_bytes=1000)


def _plan(gpus: tuple[Gpu, ...] = (GPU,), facts: Facts = FACTS, **flags: Any) -> Plan:
    config = options.make_config({"global_batch_size": 2048, **flags}, None)
    config = replace(config, given=frozenset(flags))
    return resolve(config, resolve_layout(config, gpus), facts)


def test_a_decay_of_noise_that_the_task_has_set_may_go_without_noise() -> None:
    config = options.make_config({"gradient_noise_decay": 0.5}, None)
    resolve(replace(config, given=frozenset()), resolve_layout(config, (GPU,)), FACTS)


def test_the_plan_prints_the_standard_deviation() -> None:
    plan = _plan(gradient_noise_batch=512, gradient_noise=0.01, clip_norm=1.0)
    assert "σ = 1.73 = √(2048 / 512 - 1)" in dict(plan.explanation)["gradient noise"]
    assert "gradient noise" not in dict(_plan().explanation)


def test_factors_turn_off_the_cuda_graph() -> None:
    assert _plan().graph
    assert _plan(gradient_noise=0.01).graph  # it is added after backward
    plan = _plan(gradient_noise_batch=512)
    assert not plan.graph
    with pytest.raises(SettingError, match="--graph was set"):
        _plan(gradient_noise_batch=512, graph=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gradient_noise_batch": 2048}, "--gradient-noise-batch 2048 was set"),
        ({"gradient_noise_batch": 0}, "--gradient-noise-batch 0 was set"),
        ({"gradient_noise": 0.0}, "--gradient-noise 0 was set"),
        ({"gradient_noise_decay": -1.0}, "--gradient-noise-decay -1 was set"),
        ({"gradient_noise_decay": 0.5}, "--gradient-noise-decay 0.5 was set, but it needs --gradient-noise"),
    ],
)
def test_wrong_noise_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as refused:
        _plan(**flags)
    assert said in str(refused.value)
