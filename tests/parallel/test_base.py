"""Every strategy against one device; a first fp16 step that overflows; sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from stormo.config.options import options_of
from stormo.config.schema import Workers
from stormo.config.strategies import SPECS
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel.base import Strategy, has_batch_norms
from stormo.parallel.batch_size import StateSnapshot
from stormo.parallel.ddp import DataParallel
from stormo.parallel.table import STRATEGIES
from stormo.tasks.task import Task
from stormo.training.sanity_check import explain_errors
from tests.tiny_run import Parts, arrays, assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
EXACT = {"precision": "fp64", "sync_batch_norm": True, "global_batch_size": 16}


def _train(world: World, task_options: dict[str, Any], flags: dict[str, Any], num_steps: int) -> dict[str, Any]:
    parts = build(world, task_options, **flags)
    losses = steps(parts, num_steps)
    module = parts.strategy.module
    return {"losses": np.array(losses), **arrays(module.named_parameters()), **arrays(module.named_buffers())}


def _assert_close(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=rtol, err_msg=name)


def _compare(run_ranks: Ranks, sizes: list[int], task_options: dict[str, Any], flags: dict[str, Any], num: int) -> None:
    (alone,) = run_ranks(_train, 1, task_options, flags, num)
    assert np.isfinite(alone["losses"]).all()
    assert len(set(alone["losses"])) == num
    for size in sizes:
        for ranked in run_ranks(_train, size, task_options, flags, num):
            _assert_close(ranked, alone)


@pytest.mark.parametrize(
    ("num_train", "size"),
    [
        pytest.param(37, 2, id="uneven shares"),  # 16, 16, 5
        pytest.param(34, 4, id="empty shares"),  # 16, 16, 2: some ranks have no sample
    ],
)
def test_ranks_with_synchronised_norms_train_as_one(run_ranks: Ranks, num_train: int, size: int) -> None:
    _compare(run_ranks, [size], {"num_train": num_train, "dropout": 0.0}, EXACT, 7)


def test_ranks_that_accumulate_uneven_micro_batches_train_as_one(run_ranks: Ranks) -> None:
    options = {"num_train": 39, "dropout": 0.0}  # 16, 16, 7: with two values each, as batch norm needs them
    _compare(run_ranks, [2, 3], options, EXACT | {"accumulate": 3}, 7)


@pytest.mark.parametrize("size", [1, 2])
def test_accumulation_equals_the_large_batch(run_ranks: Ranks, size: int) -> None:
    options = {"num_train": 37, "dropout": 0.0, "norm": False}
    (expected,) = run_ranks(_train, 1, options, EXACT, 7)
    for ranked in run_ranks(_train, size, options, EXACT | {"accumulate": 5}, 7):
        _assert_close(ranked, expected)


def test_clipping_uses_the_gradient_of_the_whole_batch(run_ranks: Ranks) -> None:
    options = {"num_train": 37, "dropout": 0.0}
    flags = EXACT | {"clip_norm": 0.05}
    _compare(run_ranks, [3], options, flags, 5)
    (clipped,) = run_ranks(_train, 1, options, flags, 5)
    (free,) = run_ranks(_train, 1, options, EXACT, 5)
    assert not np.allclose(clipped["0.weight"], free["0.weight"])


def _clipped_norm(world: World) -> list[float]:
    parts = build(world, {"dropout": 0.0}, precision="fp64", clip_norm=0.05, global_batch_size=16, momentum=0.0)
    before = arrays(parts.strategy.module.named_parameters())
    steps(parts, 1)
    after = arrays(parts.strategy.module.named_parameters())
    return [float(np.sqrt(sum(((before[name] - after[name]) ** 2).sum() for name in before)))]


def test_a_clipped_step_is_as_long_as_the_norm_allows(run_ranks: Ranks) -> None:
    for (length,) in run_ranks(_clipped_norm, 2):
        assert length == pytest.approx(0.1 * 0.05, rel=1e-4)  # learning rate times norm


# --- number formats ---------------------------------------------------------------------------------------------------


def _low_precision(world: World, precision: str, fault: bool) -> dict[str, Any]:
    parts = build(world, {"dropout": 0.0, "num_train": 64}, precision=precision, global_batch_size=16, clip_norm=100.0)
    seen: list[torch.dtype] = []
    parts.strategy.module.get_submodule("0").register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    before = arrays(parts.strategy.module.named_parameters())
    if fault:
        parts.strategy.scaler.load_state_dict({**parts.strategy.scaler.state_dict(), "scale": 1e30})
    losses = steps(parts, 1 if fault else 40)
    return {
        "losses": losses,
        "dtype": str(seen[0]),
        "weights": str(next(parts.strategy.module.parameters()).dtype),
        "scale": parts.strategy.scaler.state_dict().get("scale"),
        "moved": any(
            not np.array_equal(before[n], v) for n, v in arrays(parts.strategy.module.named_parameters()).items()
        ),
        "sum": float(sum(parameter.double().sum() for parameter in parts.strategy.module.parameters()).detach()),  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_training_keeps_32_bit_weights_equal(run_ranks: Ranks, precision: str) -> None:
    results = run_ranks(_low_precision, 2, precision, False)
    for result in results:
        assert result["dtype"] == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
        assert result["weights"] == "torch.float32"
        assert result["losses"][-1] < 0.7 * result["losses"][0]
        assert (result["scale"] is not None) is (precision == "fp16")
    assert results[0]["sum"] == results[1]["sum"]


def test_an_overflow_skips_the_step_and_lowers_the_scale(run_ranks: Ranks) -> None:
    for result in run_ranks(_low_precision, 2, "fp16", True):
        assert not result["moved"]
        assert result["scale"] < 1e30


# --- buffers and warm-up ----------------------------------------------------------------------------------------------


def _average(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = build(world, {"dropout": 0.0})
    steps(parts, 3)
    before = arrays(parts.strategy.module.named_buffers())
    parts.strategy.average_buffers()
    return before, arrays(parts.strategy.module.named_buffers())


@pytest.mark.parametrize("size", [1, 3])
def test_running_statistics_are_averaged_and_counters_kept(run_ranks: Ranks, size: int) -> None:
    results = run_ranks(_average, size)
    for name in ("1.running_mean", "1.running_var"):
        own = [before[name] for before, _ in results]
        if size > 1:
            assert not np.array_equal(own[0], own[1])
        mean = np.mean(np.stack(own).astype(np.float64), axis=0).astype(np.float32)
        for _, after in results:
            np.testing.assert_allclose(after[name], mean, rtol=1e-7)
            assert np.array_equal(after[name], results[0][1][name])  # equal to the last bit
    assert {int(after["1.num_batches_tracked"]) for _, after in results} == {3}


def _warm_up(world: World, flags: dict[str, Any]) -> None:
    parts = build(world, {"jitter": True, "num_train": 40}, global_batch_size=16, **flags)
    before = whole_state(parts)
    parts.strategy.warm_up(parts.loader)
    assert_same_bits(whole_state(parts), before)
    assert len(parts.strategy.optimizer.state) == 0
    assert all(parameter.grad is None for parameter in parts.strategy.module.parameters())
    assert parts.loader.wait_s == 0.0
    assert parts.strategy.module.training
    assert parts.state.progress.step == 0
    # In the middle of a run, with state in the optimizer, as after a resume.
    steps(parts, 4)
    before = whole_state(parts)
    assert before["4.weight/momentum_buffer" if flags["optimizer"] == "sgd" else "4.weight/exp_avg"].any()
    parts.strategy.warm_up(parts.loader)
    assert_same_bits(whole_state(parts), before)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, {"optimizer": "sgd"}),
        (3, {"optimizer": "adamw", "sync_batch_norm": True, "accumulate": 2, "clip_norm": 1.0}),
        (3, {"optimizer": "sgd", "precision": "fp16"}),
    ],
    ids=["sgd", "adamw", "fp16"],
)
def test_warm_up_has_no_side_effects(run_ranks: Ranks, size: int, flags: dict[str, Any]) -> None:
    run_ranks(_warm_up, size, flags)


def _first_losses(world: World, is_warm: bool) -> list[float]:
    parts = build(world, {"num_train": 40}, global_batch_size=16)
    if is_warm:
        parts.strategy.warm_up(parts.loader)
    return steps(parts, 5)


def test_warm_up_does_not_change_the_run(run_ranks: Ranks) -> None:
    cold, warm = run_ranks(_first_losses, 2, False), run_ranks(_first_losses, 2, True)
    assert cold == warm  # two ranks add in one order only, so to the last bit


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_strategy_that_can_be_set_has_its_row() -> None:
    (declared,) = (option for option in options_of("workers", Workers) if option.name == "strategy")
    assert set(declared.choices) == {"auto", *STRATEGIES, *(name for name, row in SPECS.items() if row.axis)}


def test_dp_wraps_the_model_for_the_gpus_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "DataParallel", lambda model, device_ids: (model, device_ids))

    class Layout:
        devices_per_worker = 3

    class FakePlan:
        layout = Layout()

    strategy = DataParallel.__new__(DataParallel)
    strategy._plan = FakePlan()  # type: ignore[assignment]
    model = nn.Linear(1, 1)
    wrapped: Any = strategy._wrap(model)
    assert wrapped == (model, [0, 1, 2])


class Scheduled(Tiny):
    """A task that makes a scheduler for its optimizer when training has begun."""

    kind = "cosine"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD([{"params": [weight]} for weight in model.parameters()], lr=0.1)
        return self.own

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.kind == "cosine":
            self.schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.own, 100)
        elif self.num_calls == 2:  # plateau: it leaves no mark on the optimizer, but changes the rates
            self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.own, patience=0)
            for _ in range(2):
                self.schedule.step(1.0)
        return super().loss(model, batch)


class Plateau(Scheduled):
    """The same with a scheduler that waits for a plateau."""

    kind = "plateau"


def _scheduled(world: World, task_class: type[Task]) -> tuple[str, int]:
    parts = build(world, task_class=task_class)
    num_before = 0
    try:
        parts.strategy.warm_up(parts.loader)
        num_before = parts.task.num_calls  # type: ignore[attr-defined]
        steps(parts, 3)
    except SettingError as error:
        return str(error), num_before
    return "", num_before


def test_a_scheduler_made_in_loss_ends_the_run_before_it_trains(run_ranks: Ranks) -> None:
    ((said, num_warm_up_calls),) = run_ranks(_scheduled, 1, Scheduled)
    assert "scheduler was made" in said
    assert "--decay" in said
    assert not num_warm_up_calls


def test_learning_rates_changed_by_others_end_the_run(run_ranks: Ranks) -> None:
    for said, num_warm_up_calls in run_ranks(_scheduled, 2, Plateau):
        assert "changed from 0.1 to 0.01" in said
        assert "--decay" in said
        assert num_warm_up_calls == 2


def test_an_undone_step_keeps_the_learning_rates(run_ranks: Ranks) -> None:
    assert run_ranks(_undone, 1) == [3]


def _undone(world: World) -> int:
    parts = build(world)
    before = StateSnapshot(parts.strategy)
    parts.strategy.try_step(next(parts.loader.first_and_last()).data)
    before.restore()
    return len(steps(parts, 3))


class Sometimes(nn.Module):
    """A layer that only some batches reach, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.later, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)
        self.uses_later = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.later(x) if self.uses_later else y


class Reached(Tiny):
    """The layer is reached from the second step on, and not in the fourth."""

    find_unused = True

    def model(self) -> nn.Module:
        self.net = Sometimes()
        return self.net


class AlikeOnAll(Reached):
    """All workers miss the same layers, which is all that sharded weights can have."""

    find_unused = False


class Plain(Reached):
    """With torch's optimizer, one tensor after the other."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


class PlainAdam(Reached):
    """The same with AdamW."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, foreach=False)


class Dampened(Reached):
    """With an optimizer of its own that has dampening."""

    is_fused = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=self.is_fused)


class PlainDampened(Dampened):
    """The same without a fused step."""

    is_fused = False


def _whole(module: nn.Module) -> dict[str, Any]:
    """All weights, also of a module that torch has sharded; all workers call it."""
    return arrays((name, getattr(p, "full_tensor", lambda p=p: p)()) for name, p in module.named_parameters())


def _reached(world: World, task_class: type[Reached], flags: dict[str, Any]) -> dict[str, Any]:
    parts = build(world, {"num_train": 48}, task_class=task_class, precision="fp64", global_batch_size=16, **flags)
    parts.strategy.warm_up(parts.loader)
    before = _whole(parts.strategy.module)
    for step in range(5):
        parts.task.net.uses_later = step not in (0, 3)  # type: ignore[attr-defined]
        steps(parts, 1)
        if not step:
            first = _whole(parts.strategy.module)
            assert np.array_equal(first["later.weight"], before["later.weight"])
    after = _whole(parts.strategy.module)
    assert np.array_equal(after["never.weight"], before["never.weight"])
    assert not np.array_equal(after["later.weight"], before["later.weight"])
    return after


@pytest.mark.parametrize(
    ("size", "task_class", "flags", "plain"),
    [
        (1, Reached, {}, Plain),
        (2, Reached, {}, Plain),
        (2, AlikeOnAll, {"strategy": "zero1"}, Plain),
        (2, Dampened, {}, PlainDampened),
        (1, Reached, {"optimizer": "adamw"}, PlainAdam),
        (2, Reached, {"optimizer": "lars"}, None),
        (2, AlikeOnAll, {"optimizer": "larc", "strategy": "fsdp"}, None),
        (1, Reached, {"optimizer": "novograd"}, None),
    ],
    ids=["one sgd", "sgd", "zero1", "own", "adamw", "lars", "larc", "novograd"],
)
def test_parameters_without_a_gradient_do_not_change(
    run_ranks: Ranks, size: int, task_class: type[Reached], flags: dict[str, Any], plain: type[Reached] | None
) -> None:
    first, *others = run_ranks(_reached, size, task_class, flags)
    if plain is not None:
        _assert_close(first, run_ranks(_reached, 1, plain, {})[0])
    for other in others:
        _assert_close(other, first)


def _lone_sample(world: World, num_train: int, is_synchronised: bool) -> str:
    flags = {"global_batch_size": 16, "sync_batch_norm": is_synchronised}
    parts = build(world, {"num_train": num_train}, **flags)
    try:
        parts.strategy.warm_up(parts.loader)
    except SettingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 3])
def test_a_last_batch_of_one_sample_is_refused_on_any_number_of_workers(run_ranks: Ranks, size: int) -> None:
    for said in run_ranks(_lone_sample, size, 33, True):
        assert "the last step of an epoch is a single sample" in said
        assert "--sync-batch-norm" not in said


def test_sync_batch_norm_is_proposed_if_it_helps(run_ranks: Ranks) -> None:
    assert run_ranks(_lone_sample, 2, 34, True) == [""] * 2
    for said in run_ranks(_lone_sample, 2, 34, False):
        assert "a batch of 2 leaves one of them a single sample" in said
        assert said.endswith("or --sync-batch-norm.")


class Missed(Reached):
    """The layer is reached in the first batch, which is looked at, but not in a later one; of that nothing is said."""

    find_unused = False

    def model(self) -> nn.Module:
        self.net = Sometimes()
        self.net.never.requires_grad_(False)
        return self.net


def _missed(world: World, flags: dict[str, Any], is_last_pass: bool) -> str:
    parts = build(world, {"num_train": 48}, task_class=Missed, global_batch_size=16, **flags)
    net: Any = parts.task.net  # type: ignore[attr-defined]
    try:
        for number, batch in enumerate(parts.loader.epoch(1, 0)):
            net.uses_later = number < 2 or (is_last_pass and not batch.span.is_last)
            parts.strategy.micro_step(batch)
            if batch.span.is_last:
                parts.strategy.step(0.1)
    except SettingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_without_a_gradient_in_a_later_batch_is_named(run_ranks: Ranks, accumulate: int) -> None:
    for said in run_ranks(_missed, 2, {"strategy": "ddp", "accumulate": accumulate}, accumulate > 1):
        assert said.startswith("Missed.model() has the parameters later.weight, later.bias, but Missed.loss() gave ")
        assert "set find_unused = True on Missed" in said
        assert "find_unused_parameters" not in said


@contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _two_steps(world: World, overflow: bool, flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = build(world, {"dropout": 0.0, "num_train": 16, "norm": False}, precision="fp16", batch_size=16, **flags)
    strategy, sound = parts.strategy, {"scale": 1024.0}
    before = arrays(strategy.module.named_parameters())
    with _unset_memory_is_nan():
        if overflow:
            strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), "scale": 1e30})
            steps(parts, 1)
            assert all(np.array_equal(before[n], v) for n, v in arrays(strategy.module.named_parameters()).items())
        parts.state.progress.epoch, parts.state.progress.position = 1, 0
        strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), **sound})
        steps(parts, 1)
    return before, arrays(strategy.module.named_parameters())


@pytest.mark.parametrize("flags", [{"optimizer": "sgd", "clip_norm": 0.5}, {"optimizer": "adamw"}])
def test_a_skipped_first_step_has_no_effect_on_the_second(
    run_ranks: Callable[..., list[Any]], flags: dict[str, Any]
) -> None:
    ((before, expected),) = run_ranks(_two_steps, 1, False, flags)
    ((_, actual),) = run_ranks(_two_steps, 1, True, flags)
    for name, value in expected.items():
        assert not np.array_equal(value, before[name])
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)  # NaN fails


class Lookup(nn.Module):
    """A table of its own, not torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.weight, sparse=True)


class Sparse(Tiny):
    """The tiny task on the signs of its points, each of which has a row in a table."""

    table: Callable[[], nn.Module] = Lookup

    def model(self) -> nn.Module:
        return nn.Sequential(type(self).table(), nn.Flatten(), nn.Linear(24, 3))

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model((batch[0] > 0).long()), batch[1])


class SparseLayer(Sparse):
    """With torch's layer, of which DDP knows that its gradient is sparse."""

    @staticmethod
    def table() -> nn.Module:
        return nn.Embedding(2, 3, sparse=True)


def _alone(task_class: type[Tiny], **flags: Any) -> Parts:
    return build(World(alone(), torch.device("cpu")), task_class=task_class, global_batch_size=8, **flags)


@pytest.mark.parametrize("task_class", [Sparse, SparseLayer])
def test_sparse_gradients_turn_off_the_noise_scale(task_class: type[Tiny]) -> None:
    parts = _alone(task_class, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is None
    assert parts.strategy.noise_scale_reason == "the model has sparse gradients"
    said = "The gradient noise scale is not measured, as the model has sparse gradients."
    assert parts.strategy.notices.count(said) == 1
    parts.strategy.set_accumulation(parts.plan)
    assert parts.strategy.noise_scale is None
    losses = steps(parts, 20)
    assert losses[-1] < losses[0]
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.notices.count(said) == 1


def test_what_is_only_called_sparse_is_measured() -> None:
    class Named(nn.Linear):
        sparse = True

    class Dense(Tiny):
        def model(self) -> nn.Module:
            return Named(8, 3)

    parts = _alone(Dense, accumulate=2)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is not None
    assert parts.strategy.noise_scale_reason == parts.plan.noise_scale_reason
    assert parts.strategy.notices == []


@pytest.mark.parametrize(
    "flags", [{"noise_scale": True, "accumulate": 2}, {"gradient_noise": 0.01}, {"clip_norm": 1.0}], ids=str
)
def test_settings_that_need_dense_gradients_are_refused(flags: dict[str, Any]) -> None:
    parts = _alone(Sparse, **flags)
    said = f"--{next(iter(flags)).replace('_', '-')}.* was set, but the model has sparse gradients"
    with pytest.raises(SettingError, match=said):
        parts.strategy.warm_up(parts.loader)
    with pytest.raises(SettingError, match=said):
        parts.strategy.try_step(next(iter(parts.loader.epoch(1))).data)


def test_optimizers_that_take_no_sparse_gradients_are_refused_by_name() -> None:
    class Given(Sparse):
        def optimizer(self, model: nn.Module) -> Optimizer | None:
            return None

    parts = _alone(Given, optimizer="adamw")
    with pytest.raises(SettingError, match=r"--optimizer adamw is in force, but .* sparse=False, or give"):
        parts.strategy.warm_up(parts.loader)


def _train_sparse(world: World, measures: bool) -> dict[str, Any]:
    parts = build(world, task_class=SparseLayer, global_batch_size=8, noise_scale=None if measures else False)
    assert (parts.strategy.noise_scale is not None) is measures
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.noise_scale is None
    steps(parts, 5)
    return arrays(parts.strategy.module.named_parameters())


def test_workers_agree_and_exchange_sparse_gradients_as_ddp_does(run_ranks: Ranks) -> None:
    quiet, measured = run_ranks(_train_sparse, 3, False), run_ranks(_train_sparse, 3, True)
    for one, other in zip(quiet, measured, strict=True):
        assert_same_bits(one, other)


def _refused(world: World) -> str:
    parts = build(world, task_class=Sparse, global_batch_size=8)
    with (
        pytest.warns(UserWarning, match="Grad strides do not match"),
        pytest.raises(SettingError) as refused,
        explain_errors(parts.task, "train_data", "loss"),
    ):
        parts.strategy.warm_up(parts.loader)
    return str(refused.value)


def test_a_sparse_gradient_that_ddp_does_not_expect_is_explained(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2):
        assert "Sparse.loss() has a sparse gradient that is not of a layer nn.Embedding" in said
        assert said.endswith("leave sparse=True out.")


class _OwnBatchNorm(nn.modules.batchnorm._BatchNorm):
    """As a user derives one for inputs of another shape."""


@pytest.mark.parametrize("norm", [nn.LazyBatchNorm1d(), _OwnBatchNorm(4)])
def test_every_subclass_of_torch_s_batch_norm_counts_as_one(norm: nn.Module) -> None:
    plan = SimpleNamespace(layout=SimpleNamespace(mesh=SimpleNamespace(pipeline=1)))
    strategy: Any = SimpleNamespace(_plan=plan, module=nn.Sequential(norm))
    assert Strategy.layer_kinds(strategy)["has_batch_norms"]
    assert has_batch_norms(strategy.module)  # which pipelines ask


class TellsWhetherTimed(Tiny):
    """Notes for each batch whether cuDNN would time its convolutions."""

    timed: list[tuple[int, bool]]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        length, loss = len(batch[0]), super().loss(model, batch)
        loss.register_hook(lambda _: self.timed.append((length, torch.backends.cudnn.benchmark)))  # in backward
        return loss


@pytest.mark.parametrize(
    ("num_train", "accumulate", "expected"),
    [
        pytest.param(20, 1, [(8, True), (8, True), (4, False)], id="a short step"),
        pytest.param(16, 3, [(2, True), (3, True), (3, True)] * 2, id="micro-batches of two sizes"),
        pytest.param(12, 2, [(4, True), (4, True), (2, False), (2, False)], id="a short step in micro-batches"),
        pytest.param(5, 1, [(5, True)], id="no other step"),
    ],
)
def test_convolutions_are_timed_for_every_shape_but_that_of_a_short_last_step(
    monkeypatch: pytest.MonkeyPatch, num_train: int, accumulate: int, expected: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    world = World(alone(), torch.device("cpu"))
    flags = {"global_batch_size": 8, "accumulate": accumulate}
    parts = build(world, {"num_train": num_train}, task_class=TellsWhetherTimed, **flags)
    assert isinstance(parts.task, TellsWhetherTimed)
    parts.task.timed = []
    for batch in parts.loader.epoch(1):
        parts.strategy.micro_step(batch)
    assert parts.task.timed == expected
    assert torch.backends.cudnn.benchmark


def test_a_step_that_fails_leaves_the_timing_of_convolutions_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    parts = build(World(alone(), torch.device("cpu")), {"num_train": 20}, global_batch_size=8)
    monkeypatch.setattr(parts.task, "loss", lambda model, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parts.strategy.micro_step(list(parts.loader.epoch(1))[-1])
    assert torch.backends.cudnn.benchmark
