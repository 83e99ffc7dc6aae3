"""The sanity check finds a task's mistakes and leaves no trace; tests/mistakes has what it says of most."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.training.sanity_check import Steps, _has_single_sample, check_single_samples, sanity_check
from stormo.training.state import Progress
from stormo.training.validation import Validation
from tests.commands.test_train import TASK, here, in_ranks, summary
from tests.tiny_run import Parts, assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]


def _check(parts: Parts, *, may_diverge: bool = False) -> Steps:
    validation = Validation(parts.task, parts.task.validation_data(), 64, parts.world)
    return sanity_check(parts.strategy, parts.loader, validation, may_diverge=may_diverge)


class Drawing(Tiny):
    """Uses every generator a process has."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        torch.rand(3)
        return super().loss(model, batch) + 0 * (random.random() + np.random.rand())

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        torch.rand(3)
        random.random()
        np.random.rand()
        return super().metrics(model, batch)


def _leaves_no_trace(world: World) -> None:
    parts = build(world, {"jitter": True, "num_train": 40}, task_class=Drawing, global_batch_size=16)
    generators = random.getstate(), repr(np.random.get_state())
    for num_steps in (0, 4):  # also with state in the optimizer, as after a resume
        steps(parts, num_steps)
        before = whole_state(parts)
        generators = random.getstate(), repr(np.random.get_state())
        _check(parts)
        assert_same_bits(whole_state(parts), before)
        assert generators == (random.getstate(), repr(np.random.get_state()))
        assert all(parameter.grad is None for parameter in parts.strategy.module.parameters())
        assert parts.strategy.module.training
        assert parts.strategy.notices + parts.strategy.warnings == []
        assert parts.loader.wait_s == 0.0


@pytest.mark.parametrize("size", [1, 3])
def test_a_sanity_check_leaves_no_trace(run_ranks: Ranks, size: int) -> None:
    run_ranks(_leaves_no_trace, size)


def _sizes(world: World) -> list[int]:
    parts = build(world, {"num_train": 40}, task_class=NotesSizes, global_batch_size=16)
    assert isinstance(parts.task, NotesSizes)
    _check(parts)
    return parts.task.sizes


class NotesSizes(Tiny):
    """Notes the size of every batch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


def test_the_first_and_the_short_last_step_are_tried(run_ranks: Ranks) -> None:
    assert run_ranks(_sizes, 1) == [[16, 8]]


def _micro_batches_for_single_samples(world: World, num_train: int, is_checked: bool) -> int:
    parts = build(world, {"num_train": num_train, "norm": False}, global_batch_size=16)
    checked = _check(parts) if is_checked else frozenset()
    assert isinstance(parts.task, Tiny)
    before = parts.task.num_calls
    check_single_samples(parts.strategy, parts.loader, parts.plan, Progress(), checked)
    return parts.task.num_calls - before


@pytest.mark.parametrize(("size", "num_train", "num_unchecked"), [(1, 40, 0), (1, 33, 1), (2, 35, 1)])
def test_a_step_that_leaves_a_single_sample_is_run_once_and_no_other_is_for_it(
    run_ranks: Ranks, size: int, num_train: int, num_unchecked: int
) -> None:
    assert run_ranks(_micro_batches_for_single_samples, size, num_train, False) == [num_unchecked] * size
    assert run_ranks(_micro_batches_for_single_samples, size, num_train, True) == [0] * size


def test_a_device_that_gets_one_sample_is_foreseen() -> None:
    def found(num_samples: int, accumulate: int = 1, *, workers: int = 1, devices: int = 1, parts: int = 1) -> bool:
        layout = SimpleNamespace(data_size=workers, devices_per_worker=devices)
        return _has_single_sample(SimpleNamespace(layout=layout, micro_batches=parts), num_samples, accumulate)  # type: ignore[arg-type]

    assert [size for size in range(1, 9) if found(size)] == [1]
    assert [size for size in range(1, 9) if found(size, 2)] == [1, 2, 3]
    assert [size for size in range(1, 9) if found(size, workers=3)] == [1, 2, 3, 4, 5]
    # DataParallel gives the first devices more: of 3 samples 2 and 1, of 5 samples on 3 devices 2, 2 and 1.
    assert [size for size in range(1, 9) if found(size, devices=2)] == [1, 2, 3]
    assert [size for size in range(1, 9) if found(size, devices=3)] == [1, 2, 3, 5, 7]
    assert [size for size in range(1, 9) if found(size, parts=4)] == [1, 2, 3, 4]


class TwoHeads(nn.Module):
    """One of its heads is never used, and a buffer appears in the first micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.frozen = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made_late"):
            self.register_buffer("made_late", torch.ones(3))
        return self.used(x) * self.made_late  # type: ignore[no-any-return]


class Spare(Tiny):
    def model(self) -> nn.Module:
        return TwoHeads()


class SpareAllowed(Spare):
    find_unused = True


def _unused(world: World) -> str:
    with pytest.raises(SettingError) as caught:
        _check(build(world, task_class=Spare))
    return str(caught.value)


def _unused_allowed(world: World) -> list[float]:
    parts = build(world, task_class=SpareAllowed, global_batch_size=100)
    _check(parts)
    return steps(parts, 12)


def test_a_parameter_without_a_gradient_is_refused_unless_the_task_allows_it(run_ranks: Ranks) -> None:
    said = run_ranks(_unused, 2)
    assert said == run_ranks(_unused, 1) * 2
    assert said[0].startswith("Spare.model() has the parameters spare.weight, spare.bias, but Spare.loss() gave them ")
    alone, two = run_ranks(_unused_allowed, 1)[0], run_ranks(_unused_allowed, 2)[0]
    assert two == pytest.approx(alone, rel=1e-5)
    assert two[-1] < two[0]


class Waves(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wave, self.last = nn.Parameter(torch.ones(8, dtype=dtype)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.wave).abs().to(x.dtype))  # type: ignore[no-any-return]


class Complex(Tiny):
    dtype = torch.complex64

    def model(self) -> nn.Module:
        return Waves(self.dtype)


class WideComplex(Complex):
    dtype = torch.complex128


def test_a_type_that_no_checkpoint_can_hold_is_refused_before_training() -> None:
    world = World(alone(), torch.device("cpu"))
    _check(build(world, task_class=Complex))
    with pytest.raises(SettingError, match=r"WideComplex.model\(\) has wave of type complex128, but a checkpoint"):
        _check(build(world, task_class=WideComplex))


class NotANumber(Tiny):
    """Only the last worker's loss is none."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        is_last = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 1
        return loss / 0 if is_last else loss


def _notices_of_nan(world: World) -> list[str]:
    parts = build(world, task_class=NotANumber)
    _check(parts, may_diverge=True)
    return parts.strategy.warnings


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_not_finite_is_warned_of_on_rank_0(run_ranks: Ranks, size: int) -> None:
    for notices in run_ranks(_notices_of_nan, size):
        assert [text.partition(":")[0] for text in notices] == [
            "NotANumber.loss() returned a number that is not finite in the very first batch"
        ]


class BadInputs(Tiny):
    """One value of the training set is infinite; every batch of the test is the whole set."""

    def train_data(self) -> Any:
        data: Any = super().train_data()
        data.tensors[0][3, 2] = float("inf")
        return data


def _refusal(world: World, task_class: type[Tiny]) -> str:
    parts = build(world, {"num_train": 32}, task_class=task_class, global_batch_size=32)
    with pytest.raises(SettingError) as caught:
        _check(parts)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
def test_a_first_loss_that_is_not_finite_is_refused_by_all_workers(run_ranks: Ranks, size: int) -> None:
    of_loss = (
        "NotANumber.loss() returned a number that is not finite in the very first batch, but no step can be learned "
        "from it; look for a division by zero, a log of zero, inputs that are not scaled or overflow in fp16, or set "
        "--on-divergence ignore to train all the same."
    )
    of_inputs = (
        "BadInputs.train_data() gave inputs that are not finite numbers in the very first batch, but no step can be "
        "learned from it; clean the data (torch.isfinite finds such values), or set --on-divergence ignore to train "
        "all the same."
    )
    assert run_ranks(_refusal, size, NotANumber) == [of_loss] * size
    assert run_ranks(_refusal, size, BadInputs) == [of_inputs] * size


class Failing(Tiny):
    """Raises its error."""

    error: Exception = ValueError()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise self.error


def _failing(world: World, error: Exception) -> tuple[str, str]:
    parts = build(world, task_class=Failing)
    parts.task.error = error  # type: ignore[attr-defined]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        _check(parts)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "error",
    [ValueError("the same device"), RuntimeError("boom"), AttributeError("'Net' object has no attribute 'x'")],
    ids=["ValueError", "RuntimeError", "AttributeError"],
)
def test_an_error_of_the_users_own_is_unchanged(run_ranks: Ranks, error: Exception) -> None:
    assert run_ranks(_failing, 1, error) == [(type(error).__name__, str(error))]


class Halved(Tiny):
    def model(self) -> nn.Module:
        return nn.Linear(8, 3, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)


def _mixed_types(world: World) -> str:
    with pytest.raises(SettingError) as caught:
        _check(build(world, task_class=Halved))
    return str(caught.value)


def test_numbers_of_several_types_are_explained(run_ranks: Ranks) -> None:
    (said,) = run_ranks(_mixed_types, 1)
    assert said.startswith("Halved.loss() mixes tensors (test_sanity_check.py, line ")
    assert "must be of one type; let the data set give torch.float32 (.float())" in said


class Means(Tiny):
    """Returns one sum, and two values that are none."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        scores = model(x)
        right = (scores.argmax(dim=1) == y).float()
        return {"loss": cross_entropy(scores, y), "accuracy": right.sum(), "share": right.mean()}


class Whole(Means):
    """Takes no batch but a whole one."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) != 64:
            raise ValueError("64 samples are taken")
        return super().metrics(model, batch)


def _found_means(world: World, task_class: type[Tiny]) -> list[str]:
    parts = build(world, task_class=task_class, global_batch_size=64)
    _check(parts)
    return parts.strategy.warnings


def test_a_mean_among_the_metrics_is_noticed_and_a_sum_is_not(run_ranks: Ranks) -> None:
    (notices,) = run_ranks(_found_means, 1, Means)
    assert [text.split("'")[1] for text in notices] == ["loss", "share"]
    assert notices[0].startswith("Means.metrics() returned 'loss' as ")
    assert notices[0].endswith(
        " for its halves, as if it were a mean: return the sum over the samples (a mean times their number), which is "
        "divided by the number of all samples."
    )
    assert run_ranks(_found_means, 1, Tiny) == [[]]
    assert run_ranks(_found_means, 1, Whole) == [[]]


# --- out of memory ----------------------------------------------------------------------------------------------------

ADVICE = "a smaller --batch-size (with --accumulate the global batch stays) or "


def test_a_pass_that_does_not_fit_is_a_setting_that_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_MEMORY", "* 20")
    assert here("--batch-size", "32") == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "stormo: micro-batches of 32 samples were set, but one does not fit into the memory of this host (CUDA out of "
        f"memory, on purpose, with 32 samples); set {ADVICE}--checkpoint-activations or --strategy fsdp --offload; "
        f"stormo predict {TASK} says before a start what fits."
    )
    assert not list(tmp_path.glob("runs/*"))


def test_the_worker_that_runs_out_is_noticed_and_ends_the_job(tmp_path: Path) -> None:
    flags = ["--batch-size", "32", "--checkpoint-activations", "--run-name", "one"]
    done = in_ranks(tmp_path, *flags, TINY_MEMORY="1 20")
    assert done.returncode == 2
    assert "micro-batches of 32 samples were set, but one does not fit" in done.stderr
    assert f"set {ADVICE}--strategy fsdp; stormo predict " in done.stderr
    assert not (tmp_path / "runs" / "one").exists()


def test_a_run_that_runs_out_on_its_way_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY_FAULT", "memory 0 4")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        here("--run-name", "one", "--checkpoint-every", "1")
    advice = f"{ADVICE}--checkpoint-activations or --strategy fsdp --offload"
    assert f"Out of memory: resume with --resume and {advice}." in caught.value.__notes__
    assert summary(tmp_path / "runs" / "one")["stopped_by"] == "error"
