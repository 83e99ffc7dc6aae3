"""Gradients that travel in fewer bytes: the arithmetic against plain transcriptions, whole trainings, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.parallel.compression import GradBucket, HalfPrecision, PowerSgd, Wire, orthonormalise
from stormo.parallel.ddp import Ddp
from tests.parallel.test_base import SparseLayer
from tests.parallel.test_server import Odd
from tests.tiny_run import Parts, arrays, assert_same_bits, build, save, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]


def _wire(world: World) -> Wire:
    group = dist.group.WORLD
    assert group is not None
    return Wire(group, world.device)


# --- sixteen bits -----------------------------------------------------------------------------------------------------


def _halved(world: World, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
    flat = parts[world.rank].clone()
    HalfPrecision(dtype).exchange(GradBucket(flat=flat, gradients=[], parameters=[]), _wire(world))
    return flat


@pytest.mark.parametrize(
    ("dtype", "kept", "length"),
    [
        (torch.bfloat16, torch.float32, 0),
        (torch.bfloat16, torch.float64, 7),
        (torch.bfloat16, torch.float32, 1000),
        (torch.float16, torch.float32, 1),
        (torch.float16, torch.float64, 1000),
    ],
)
def test_numbers_are_rounded_twice_for_any_number_of_workers(
    run_ranks: Ranks, dtype: torch.dtype, kept: torch.dtype, length: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    parts = [torch.randn(length, generator=generator, dtype=kept) * 1e-3 for _ in range(3)]
    # At these sizes fp16 is as good with any power of two in front of it.
    factor = 1.0 if dtype is torch.bfloat16 else 2.0**20
    rounded = [(part * factor).to(dtype).to(kept) for part in parts]
    expected = torch.stack(rounded).sum(dim=0).to(dtype).to(kept) / factor
    found = run_ranks(_halved, 3, dtype, parts)
    assert all(torch.equal(each, found[0]) for each in found)
    last_bit = torch.finfo(dtype).eps * expected.abs()  # the sum may be rounded the other way
    assert ((found[0] - expected).abs() <= last_bit).all()
    assert (found[0] == expected).double().mean() > 0.95 or length < 10
    assert found[0].dtype is kept


def test_fp16_scales_and_keeps_values_that_are_not_finite(run_ranks: Ranks) -> None:
    for size in (1e-20, 1e30, 0.0):
        part = torch.linspace(0.5, 1.0, 50) * size
        for found in run_ranks(_halved, 2, torch.float16, [part, part]):
            assert torch.allclose(found, 2 * part, rtol=2e-3, atol=0)
    bad = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf, 2.0])
    for dtype in (torch.float16, torch.bfloat16):
        for found in run_ranks(_halved, 2, dtype, [bad, torch.ones(5)]):
            assert torch.equal(torch.isfinite(found), torch.isfinite(bad))


def test_an_all_reduce_in_sixteen_bits_has_a_larger_error(run_ranks: Ranks) -> None:
    parts = [torch.full((64,), 1.0)] + [torch.full((64,), 2.0**-9)] * 3  # each alone is lost beside the first
    found = run_ranks(_halved, 4, torch.bfloat16, parts)[0]
    assert torch.equal(found, torch.full((64,), 1.0 + 2.0**-7))  # 3/512, rounded up to what bf16 has after 1


# --- low rank ---------------------------------------------------------------------------------------------------------


class _Pair(nn.Module):
    """A matrix that is cut, one in other strides, and what travels whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(12, 5, 3))
        self.turned = nn.Parameter(torch.zeros(9, 14).t())
        self.bias = nn.Parameter(torch.zeros(12))
        self.small = nn.Parameter(torch.zeros(3, 3))
        self.empty = nn.Parameter(torch.zeros(0, 4))


def _gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in _Pair().named_parameters()
    }


def _sent(world: World, num_steps: int, rank: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    module = _Pair()
    method, wire, found = PowerSgd(module, rank, seed=3), _wire(world), []
    for step in range(num_steps):
        own = _gradients(world.rank, step)
        gradients = [own[name].clone() for name, _ in module.named_parameters()]
        flat = torch.zeros(0)
        method.exchange(GradBucket(flat=flat, gradients=gradients, parameters=list(module.parameters())), wire)
        found.append(arrays((name, g) for (name, _), g in zip(module.named_parameters(), gradients, strict=True)))
    return found, arrays(method.errors.items())


def _transcribed(num_workers: int, num_steps: int, rank: int) -> list[dict[str, Tensor]]:
    """The paper's algorithm for all workers at once, by a QR decomposition."""
    torch.set_default_dtype(torch.float64)
    bases = {name: basis.clone() for name, basis in PowerSgd(_Pair(), rank, seed=3).bases.items()}
    assert set(bases) == {"wide", "turned"}
    errors = {name: [torch.zeros(())] * num_workers for name in bases}
    found = []
    for step in range(num_steps):
        gradients = [_gradients(worker, step) for worker in range(num_workers)]
        sums = {name: sum(each[name] for each in gradients) for name in gradients[0]}
        for name, basis in bases.items():
            shape = gradients[0][name].shape
            matrices = [
                each[name].reshape(shape[0], -1) + error for each, error in zip(gradients, errors[name], strict=True)
            ]
            total = torch.stack(matrices).sum(dim=0)
            left = torch.linalg.qr(total @ basis).Q
            bases[name] = total.t() @ left
            errors[name] = [matrix - left @ (left.t() @ matrix) for matrix in matrices]
            sums[name] = (left @ bases[name].t()).view(shape)
        found.append({name: torch.as_tensor(value) for name, value in sums.items()})
    torch.set_default_dtype(torch.float32)
    return found


def test_powersgd_is_the_power_iteration_of_the_paper(run_ranks: Ranks) -> None:
    expected = _transcribed(3, 4, 2)
    results = run_ranks(_sent, 3, 4, 2)
    for found, _ in results:
        for step, each in enumerate(expected):
            for name, value in each.items():
                np.testing.assert_allclose(found[step][name], value.numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
            assert_same_bits(found[step], results[0][0][step])  # on all workers
    for name in ("wide", "turned"):
        sent = sum(found[name] for found in results[0][0])
        kept = sum(errors[name] for _, errors in results)
        whole = sum(_gradients(rank, step)[name] for rank in range(3) for step in range(4))
        np.testing.assert_allclose(sent + kept.reshape(sent.shape), torch.as_tensor(whole).numpy(), atol=1e-9)
        assert np.abs(kept).max() > 0.1


def _of_one_direction(world: World) -> tuple[Any, Any, Any]:
    torch.set_default_dtype(torch.float64)
    module = nn.Linear(20, 30, bias=False)
    method, wire = PowerSgd(module, 3, seed=0), _wire(world)
    generator = torch.Generator().manual_seed(1)  # the same directions on both
    left, right = torch.randn(30, 1, generator=generator), torch.randn(1, 20, generator=generator)
    found = []
    for gradient in (torch.zeros(30, 20), (1 + world.rank) * left @ right, (2 - world.rank) * left @ right):
        bucket = GradBucket(flat=torch.zeros(0), gradients=[gradient], parameters=[module.weight])
        method.exchange(bucket, wire)
        found.append(gradient.numpy().copy())
    return found, (3 * left @ right).numpy(), method.errors["weight"].abs().max().item()


def test_gradients_of_low_rank_are_exact(run_ranks: Ranks) -> None:
    for found, expected, kept in run_ranks(_of_one_direction, 2):
        assert not found[0].any()
        np.testing.assert_allclose(found[1], expected, atol=1e-12)
        np.testing.assert_allclose(found[2], expected, atol=1e-12)
        assert kept < 1e-12


def _skipped(world: World) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    module = nn.Linear(20, 30, bias=False)
    method, wire, found = PowerSgd(module, 1, seed=0), _wire(world), []
    gradient = torch.randn(30, 20, generator=torch.Generator().manual_seed(1))
    for factor in (1 - world.rank, 0, world.rank):  # used by the first worker, by none, by the second
        sent = factor * gradient
        method.exchange(GradBucket(flat=torch.zeros(0), gradients=[sent], parameters=[module.weight]), wire)
        found.append([each.numpy().copy() for each in (sent, method.errors["weight"], method.bases["weight"])])
    return found


def test_error_feedback_waits_for_the_next_use_of_a_layer(run_ranks: Ranks) -> None:
    for used, skipped, again in run_ranks(_skipped, 2):
        assert used[0].any()
        assert again[0].any()
        assert not skipped[0].any()
        assert np.array_equal(skipped[1], used[1])
        assert np.array_equal(skipped[2], used[2])
        assert not np.array_equal(again[2], used[2])


def test_dependent_columns_become_zero() -> None:
    matrix = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    matrix = torch.cat([matrix, matrix @ torch.tensor([[2.0], [-1.0]]), torch.zeros(50, 1)], dim=1)
    orthonormalise(matrix)
    assert torch.allclose(matrix.t() @ matrix, torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0])), atol=1e-5)


# --- in a training ----------------------------------------------------------------------------------------------------

LOW_RANK: dict[str, Any] = {"compress": "powersgd", "compress_rank": 1}
OPTIONS = {"num_train": 40, "dropout": 0.3, "jitter": True, "width": 24}


def _trained(world: World, task: type[Tiny], flags: dict[str, Any]) -> tuple[Any, list[float], float | None]:
    parts = build(world, {**OPTIONS, "dropout": 0.0, "norm": False}, task_class=task, global_batch_size=16, **flags)
    parts.strategy.warm_up(parts.loader)
    losses = steps(parts, 30)
    meter = parts.strategy.noise_scale
    scale = None if meter is None else meter.collect_moments()[0]
    return arrays(parts.strategy.module.named_parameters()), losses, scale


@pytest.mark.parametrize(
    ("flags", "task", "within"),
    [
        ({"compress": "fp16", "precision": "fp16"}, Tiny, 0.01),
        ({"compress": "fp16", "precision": "fp64"}, Odd, 0.01),
        ({"compress": "bf16", "accumulate": 2, "clip_norm": 1.0}, Tiny, 0.01),
        (LOW_RANK, Tiny, 0.5),  # one direction at a time
    ],
    ids=["fp16", "odd fp16", "accumulated bf16", "powersgd"],
)
def test_compressed_training_is_close_and_workers_stay_equal(
    run_ranks: Ranks, flags: dict[str, Any], task: type[Tiny], within: float
) -> None:
    plain = {key: value for key, value in flags.items() if not key.startswith("compress")}
    _, expected, scale = run_ranks(_trained, 3, task, plain)[0]
    results = run_ranks(_trained, 3, task, flags)
    for weights, losses, own_scale in results:
        assert_same_bits(weights, results[0][0])
        assert losses != expected
        assert np.mean(losses[-6:]) < 0.6 * losses[0]
        np.testing.assert_allclose(np.mean(losses[-6:]), np.mean(expected[-6:]), rtol=within)
        if flags["compress"] == "powersgd":
            assert own_scale is None
        elif scale is not None:
            assert own_scale == pytest.approx(scale, rel=0.1)


class _Laid(nn.Module):
    """Weights as they come, or in other strides."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 12, 2)
        weight = torch.randn(20, 12)
        self.weight = nn.Parameter(weight.t().contiguous().t() if is_turned else weight)
        self.phases = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 2, 2, 2)).flatten(1) @ self.weight.t()
        return self.last(x.relu()) * self.phases.abs()  # type: ignore[no-any-return]


class _Turned(Tiny):
    def model(self) -> nn.Module:
        return _Laid(is_turned=self.options.label == "turned")


def _laid(world: World, is_turned: bool) -> dict[str, Any]:
    flags = {**LOW_RANK, "precision": "fp64", "channels_last": is_turned, "global_batch_size": 16}
    parts = build(world, {"num_train": 40, "label": "turned" if is_turned else None}, task_class=_Turned, **flags)
    steps(parts, 6)
    return arrays(parts.strategy.module.named_parameters()) | _kept(parts)


def test_powersgd_does_not_depend_on_memory_formats(run_ranks: Ranks) -> None:
    for plain, turned in zip(run_ranks(_laid, 3, False), run_ranks(_laid, 3, True), strict=True):
        assert {"error/conv.weight", "error/weight"} < plain.keys() == turned.keys()
        for name, value in plain.items():
            np.testing.assert_allclose(turned[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


def _failed(world: World) -> str:
    parts = build(world, OPTIONS, global_batch_size=16, compress="bf16")
    assert isinstance(parts.strategy, Ddp)
    assert parts.strategy._compression is not None
    parts.strategy._compression._method = _Failing()
    with pytest.raises(LookupError) as failure:
        steps(parts, 1)
    return str(failure.value)


class _Failing:
    def exchange(self, bucket: GradBucket, wire: Wire) -> None:
        raise LookupError("it went wrong")


def test_an_error_in_the_thread_is_raised_by_backward(run_ranks: Ranks) -> None:
    assert run_ranks(_failed, 2) == ["it went wrong"] * 2


def _refused(world: World) -> str:
    parts = build(world, task_class=SparseLayer, global_batch_size=8, compress="bf16", noise_scale=False)
    with pytest.raises(SettingError) as refused:
        parts.strategy.warm_up(parts.loader)
    return str(refused.value)


def _unlike(world: World) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + world.rank)
    try:
        build(world, OPTIONS, global_batch_size=16, compress="bf16")  # rounded where the pieces meet
        with pytest.raises(SettingError) as refused:
            build(world, OPTIONS, global_batch_size=16, **LOW_RANK)
    finally:
        torch.set_num_threads(before)
    return str(refused.value)


def test_powersgd_needs_equal_arithmetic(run_ranks: Ranks) -> None:
    told = "the number of threads of --compress powersgd is 1 on rank 0, but it is 2 on rank 1; "
    assert all(sentence.startswith(told) for sentence in run_ranks(_unlike, 2))


def test_sparse_gradients_are_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_refused, 2):
        assert sentence.startswith("--compress bf16 was set, but the model has sparse gradients")


def _too_large(world: World) -> str:
    with pytest.raises(SettingError) as refused:
        build(world, OPTIONS, global_batch_size=16, compress="powersgd", compress_rank=4)
    return str(refused.value)


def test_a_rank_that_saves_nothing_is_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_too_large, 2):
        assert sentence.endswith("; set --compress bf16, or a smaller --compress-rank.")


# --- saved and resumed ------------------------------------------------------------------------------------------------


def _kept(parts: Parts) -> dict[str, Any]:
    powersgd = parts.strategy.powersgd
    if powersgd is None:
        return {}
    bases = arrays((f"basis/{name}", tensor) for name, tensor in powersgd.bases.items())
    return bases | arrays((f"error/{name}", tensor) for name, tensor in powersgd.errors.items())


def _whole_and_resumed(world: World, folder: str, flags: dict[str, Any]) -> tuple[Any, ...]:
    whole = build(world, OPTIONS, global_batch_size=16, **flags)
    whole.strategy.warm_up(whole.loader)
    steps(whole, 5)
    path, kept = save(whole, folder), _kept(whole)
    losses = steps(whole, 4)
    torch.manual_seed(99)
    resumed = build(world, OPTIONS, global_batch_size=16, **flags)
    resumed.state.restore(world, Path(path), 0)
    resumed.strategy.warm_up(resumed.loader)  # passes of no step
    assert isinstance(resumed.strategy, Ddp)
    assert_same_bits(_kept(resumed), kept)
    losses_again = steps(resumed, 4)
    return losses, losses_again, {**whole_state(whole), **_kept(whole)}, {**whole_state(resumed), **_kept(resumed)}


@pytest.mark.parametrize("flags", [{"compress": "fp16"}, {**LOW_RANK, "optimizer": "adamw"}], ids=["fp16", "powersgd"])
def test_a_resumed_run_is_the_whole_run_to_the_last_bit(
    run_ranks: Ranks, tmp_path: Path, flags: dict[str, Any]
) -> None:
    for losses, losses_again, end, end_again in run_ranks(_whole_and_resumed, 3, str(tmp_path), flags):
        assert losses == losses_again
        assert_same_bits(end, end_again)


def _saved(world: World, folder: str) -> tuple[str, Any]:
    parts = build(world, OPTIONS, global_batch_size=16, **LOW_RANK)
    steps(parts, 3)
    return save(parts, folder), _kept(parts)


def _taken_up(world: World, path: str, flags: dict[str, Any]) -> tuple[Any, list[float]]:
    parts = build(world, OPTIONS, global_batch_size=16, **flags)
    parts.state.restore(world, Path(path), 0)
    return _kept(parts), steps(parts, 2)


def test_other_workers_resume_with_the_same_sum_of_errors(run_ranks: Ranks, tmp_path: Path) -> None:
    saved = run_ranks(_saved, 3, str(tmp_path))
    taken = run_ranks(_taken_up, 2, saved[0][0], LOW_RANK)
    for name, basis in saved[0][1].items():
        if name.startswith("basis/"):
            assert np.array_equal(taken[0][0][name], basis)
        else:
            had, have = (sum(each[name].astype(np.float64) for each in group) for group in _columns(saved, taken))
            assert np.abs(had).max() > 0
            np.testing.assert_allclose(have, had, atol=1e-7)
    others: list[dict[str, Any]] = [{}, {"strategy": "fsdp"}, {"strategy": "local"}, {**LOW_RANK, "compress_rank": 2}]
    for size, flags in ((1, LOW_RANK), *((2, flags) for flags in others)):
        for _, losses in run_ranks(_taken_up, size, saved[0][0], flags):
            assert np.isfinite(losses).all()


def test_a_checkpoint_of_one_worker_has_no_errors(run_ranks: Ranks, tmp_path: Path) -> None:
    ((path, kept),) = run_ranks(_saved, 1, str(tmp_path))
    assert kept == {}
    for taken, losses in run_ranks(_taken_up, 2, path, LOW_RANK):
        assert np.isfinite(losses).all()
        assert not any(value.any() for name, value in taken.items() if name.startswith("error/"))
        assert all(value.any() for name, value in taken.items() if name.startswith("basis/"))


def _columns(saved: list[tuple[str, Any]], taken: list[tuple[Any, list[float]]]) -> tuple[list[Any], list[Any]]:
    return [kept for _, kept in saved], [kept for kept, _ in taken]
