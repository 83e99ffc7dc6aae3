"""What a loop may and must not do between micro-batches, beside other models, and alone on a node."""

from __future__ import annotations

import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel.exchange import GradientExchange
from stormo.script.world import World
from tests.ranks import RankFailedError
from tests.script.loops import Ranks, Weights, data, make, weights, world_of


def _micro_batches(world: World) -> Any:
    return world.loader(DataLoader(data(), batch_size=8), accumulate=2)


def _clipped(world: World) -> None:
    model, optimizer = world.wrap(*make())
    for x, y in _micro_batches(world):
        world.backward(F.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_are_not_complete_stay_as_they_are() -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    with pytest.raises(SettingError, match=r"changed between the micro-batches of a step.*clip with world.clip"):
        _clipped(world)


def _scaled(world: World) -> None:
    model, optimizer = world.wrap(*make())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # not passed to wrap
    for x, y in _micro_batches(world):
        world.backward(scaler.scale(F.mse_loss(model(x), y)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _scheduled(world: World) -> None:
    model, optimizer = world.wrap(*make())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for x, y in _micro_batches(world):
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()


def _saved_with_a_scheduler(world: World) -> None:
    model, optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    world.wrap(model, optimizer)
    world.save("saved")


@pytest.mark.parametrize("loop", [_scaled, _scheduled, _saved_with_a_scheduler])
def test_a_scheduler_or_loss_scaler_that_was_not_wrapped_is_refused(loop: Any) -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    with pytest.raises(SettingError, match=r"pass it along with the model, or afterwards: world\.wrap\(sc"):
        loop(world)


def _loaded_from_a_schedule(workers: Workers, folder: str) -> float:
    """An optimizer whose state was saved under a scheduler, in a script that has none."""
    world = world_of(workers)
    model, optimizer = make(has_norm=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = optimizer.state_dict()
    model, optimizer = make(has_norm=False)
    optimizer.load_state_dict(state)
    assert "initial_lr" in optimizer.param_groups[0]
    world.wrap(model, optimizer)
    for x, y in _micro_batches(world):
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    world.save(folder)
    return float(sum(parameter.detach().sum() for parameter in model.parameters()))


def test_an_optimizer_state_of_a_scheduled_run_trains_and_is_saved_without_a_scheduler(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    (alone_,) = run_ranks(_loaded_from_a_schedule, 1, str(tmp_path / "one"))
    assert run_ranks(_loaded_from_a_schedule, 2, str(tmp_path / "two")) == pytest.approx([alone_] * 2, rel=1e-12)


def _one_of_two(workers: Workers, folder: str) -> tuple[list[str], Any]:
    world = world_of(workers)
    idle, _ = world.wrap(*make())
    model, optimizer = make(has_norm=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    model, optimizer = world.wrap(model, optimizer)
    finished: list[str] = []
    finish = GradientExchange.finish

    def noted(self: GradientExchange) -> None:
        finished.append("model" if self._model is model else "idle")
        finish(self)

    GradientExchange.finish = noted  # type: ignore[method-assign]
    try:
        for x, y in world.loader(DataLoader(data(), batch_size=19)):
            world.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            world.save(folder)
    finally:
        GradientExchange.finish = finish  # type: ignore[method-assign]
    return finished, idle.last.weight.grad


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_a_gradient_is_neither_exchanged_nor_in_the_way_of_a_save(
    run_ranks: Ranks, size: int, tmp_path: Path
) -> None:
    for finished, gradient in run_ranks(_one_of_two, size, str(tmp_path)):
        assert gradient is None
        assert size == 1 or finished == ["model", "model"]


def _nothing_counts_here(workers: Workers) -> list[float]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    for x, y in world.loader(DataLoader(data(), batch_size=38)):
        errors = (model(x) - y).square().mean(dim=1)
        mask = torch.full((len(x),), float(world.is_main))  # the other workers have no valid row
        world.backward((errors * mask).sum() / mask.sum(), count=int(mask.sum()))
        optimizer.step()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def test_a_worker_on_which_nothing_counts_leaves_the_mean_alone(run_ranks: Ranks) -> None:
    first, second = run_ranks(_nothing_counts_here, 2)
    assert first == second
    assert all(math.isfinite(number) for number in first)


def _masked(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((model(x) - y).square().sum(dim=1) * mask).sum() / mask.sum()


def _nothing_counts_behind_a_norm(workers: Workers) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    for x, y in world.loader(DataLoader(data(12), batch_size=6)):
        optimizer.zero_grad()
        mask = torch.full((len(x),), float(world.rank != 1), dtype=x.dtype)  # zero divided by zero there
        world.backward(_masked(model, x, y, mask), count=float(mask.sum()))
        optimizer.step()
    return weights(model)


def test_a_mean_of_nothing_on_one_worker_leaves_the_gradients_of_a_shared_norm_exact(run_ranks: Ranks) -> None:
    model, optimizer = make()
    for x, y in DataLoader(data(12), batch_size=6):
        optimizer.zero_grad()
        _masked(model, x, y, torch.tensor([1.0, 1, 0, 0, 1, 1], dtype=x.dtype)).backward()  # thirds of two samples
        optimizer.step()
    expected = weights(model)
    for found in run_ranks(_nothing_counts_behind_a_norm, 3):
        assert all(torch.allclose(found[name], value, rtol=1e-10) for name, value in expected.items())


def _loader_on_one(workers: Workers) -> None:
    world = world_of(workers)
    with world.once_per_node() as mine:
        if mine:
            world.loader(data(), batch_size=2)


def test_what_all_must_do_is_refused_while_one_works_for_its_node(run_ranks: Ranks) -> None:
    with pytest.raises(
        RankFailedError, match=r"world.loader in test_backward.py line .* was called inside `with world.once"
    ):
        run_ranks(_loader_on_one, 2)


def _forked(workers: Workers) -> list[str]:
    world = world_of(workers)
    batches = iter(world.loader(DataLoader(data(), batch_size=8)))
    next(batches)
    said = []
    for call in (lambda: world.sum(1), lambda: next(batches), lambda: world.stop_requested, world.close):
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer releases of Python warn of every fork beside threads
            pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # where it would wait for ever
            try:
                call()
            except Exception as error:
                os.write(theirs, str(error).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            said.append(pipe.read())
        os.waitpid(pid, 0)
    assert world.sum(1) == 2  # the worker itself continues
    return said


def test_a_process_that_a_worker_has_forked_is_refused_by_every_call(run_ranks: Ranks) -> None:
    for rank, said in enumerate(run_ranks(_forked, 2)):
        assert said[0].startswith("world.sum of a number in test_backward.py line ")
        for sentence in said:
            assert f"was called, but this process was forked from rank {rank}" in sentence


def _closed(workers: Workers) -> list[str]:
    world = world_of(workers)
    batches = iter(world.loader(DataLoader(data(), batch_size=8)))
    next(batches)
    world.close()
    world.close()
    said = []
    for call in (lambda: world.sum(1), lambda: next(batches), world.barrier):
        with pytest.raises(SettingError) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_a_closed_world_says_so_to_every_call(run_ranks: Ranks) -> None:
    (said,) = run_ranks(_closed, 1)
    assert said[0].startswith("world.sum of a number in test_backward.py line ")
    for sentence in said:
        assert sentence.endswith(" was called, but the world is closed; call it before world.close().")


def _frozen_on_one(workers: Workers) -> None:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    model.first.requires_grad_(world.is_main)
    for x, y in world.loader(DataLoader(data(), batch_size=8)):
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()


def test_workers_that_train_different_parameters_are_refused(run_ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 is at: .* over 4 parameters .*, but rank 1 is at: .* over 2 "):
        run_ranks(_frozen_on_one, 2)


def _stuck(workers: Workers) -> list[str]:
    world = world_of(workers)
    world.wrap(*make())  # with batch norm
    check, said = world._loop.check, []
    for what, call in (("a batch norm", check.guarded), ("world.sum", lambda what, wait: check._guard(wait))):
        check.post("world.sum")
        check.wait()
        with pytest.raises(PeerFailedError) as failed:
            call(what, _wait_in_vain)
        said.append(str(failed.value))
        check._broken = None
    return said


def _wait_in_vain() -> None:
    raise RuntimeError("[gloo] Timed out waiting 8000ms for recv operation to complete")


def test_workers_whose_wait_times_out_say_in_what_and_that_batch_norm_may_be_why(run_ranks: Ranks) -> None:
    remark = " If nothing else has failed: a batch norm that only some workers run waits like this"
    for rank, said in enumerate(run_ranks(_stuck, 2)):
        for sentence, what in zip(said, ("a batch norm", "world.sum"), strict=True):
            assert sentence.startswith(f"rank {rank} is at: {what}; another rank has not come within 8 s.{remark}")


class _Two(nn.Module):
    """A head for each of two losses, on one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A mean over samples, a mean over the values above zero, and how many these are."""
        hidden, is_valid = torch.tanh(self.body(x)), (y > 0).double()
        masked = ((self.right(hidden) - y) ** 2 * is_valid).sum() / is_valid.sum()
        return F.mse_loss(self.left(hidden), y), masked, float(is_valid.sum())


def _two() -> tuple[_Two, torch.optim.SGD]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model = _Two()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _several_losses(workers: Workers, more: bool, counts_first: bool) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*_two())
    for x, y in world.loader(DataLoader(data(), batch_size=10)):
        first, second, num_valid = model.losses(x, y)
        world.backward(first, count=len(x) if counts_first else None, more=more, retain_graph=True)
        world.backward(second, count=num_valid)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def _expected_losses() -> Weights:
    model, optimizer = _two()
    for x, y in DataLoader(data(), batch_size=10):
        first, second, _ = model.losses(x, y)
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(("more", "counts_first"), [(True, True), (True, False), (False, True)])
def test_each_loss_of_a_batch_is_a_mean_over_what_it_counts(run_ranks: Ranks, more: bool, counts_first: bool) -> None:
    expected = _expected_losses()
    for size in (1, 3):
        for found in run_ranks(_several_losses, size, more, counts_first):
            assert all(torch.allclose(found[name], expected[name], rtol=1e-11, atol=1e-13) for name in expected)


def _losses_of_micro_batches(workers: Workers, same: bool) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*_two())
    for x, y in world.loader(DataLoader(data(40), batch_size=20), accumulate=2):
        first, second, num_valid = model.losses(x, y)
        world.backward(first, count=len(x), more=True, retain_graph=True)
        world.backward(first * 2 if same else second, count=len(x) if same else num_valid)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_losses_of_several_micro_batches_are_means_over_all_of_them_or_refused(run_ranks: Ranks) -> None:
    model, optimizer = _two()
    for x, y in DataLoader(data(40), batch_size=20):
        (3 * model.losses(x, y)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = weights(model)
    for found in run_ranks(_losses_of_micro_batches, 2, True):
        assert all(torch.allclose(found[name], expected[name], rtol=1e-11, atol=1e-13) for name in expected)
    with pytest.raises(RankFailedError, match=r"counts that differ between the micro-batches.*one count="):
        run_ranks(_losses_of_micro_batches, 2, False)


def _closure_losses(workers: Workers, is_rare: bool) -> Weights:
    world = world_of(workers)
    model, _ = _two()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    world.wrap(model, optimizer)
    for x, y in world.loader(DataLoader(data(), batch_size=38)):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            first, second, num_valid = model.losses(x, y)  # noqa: B023
            if is_rare:  # one sample in all: the others' share is a mean of nothing
                is_valid = (x[:, 0] == data().tensors[0][:, 0].max()).double()  # noqa: B023
                second, num_valid = (model.body(x).sum(1) * is_valid).sum() / is_valid.sum(), is_valid.sum().item()  # noqa: B023
            world.backward(first, retain_graph=True, more=is_rare, count=len(x) if is_rare else None)  # noqa: B023
            world.backward(second, count=num_valid)
            return first + second

        optimizer.step(closure)
    return weights(model)


@pytest.mark.parametrize("is_rare", [False, True])
def test_a_closure_with_several_losses_returns_that_of_all_workers(run_ranks: Ranks, is_rare: bool) -> None:
    expected = run_ranks(_closure_losses, 1, is_rare)[0]
    for found in run_ranks(_closure_losses, 3, is_rare):
        assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-11) for name in expected)


def _two_loaders(workers: Workers, is_counted: bool) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    first = world.loader(DataLoader(data(24), batch_size=8))
    second = world.loader(DataLoader(data(36), batch_size=12))
    for one, two in zip(first, second, strict=True):
        counts = [len(one[0]), len(two[0])] if is_counted else [None, None]
        world.backward(F.mse_loss(model(one[0]), one[1]), loader=first, count=counts[0], more=True)
        world.backward(F.mse_loss(model(two[0]), two[1]), loader=second, count=counts[1])
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_losses_of_two_loaders_are_two_means_counted_or_not(run_ranks: Ranks) -> None:
    expected = run_ranks(_two_loaders, 2, False)[0]
    for found in run_ranks(_two_loaders, 2, True):
        assert all(torch.allclose(found[name], expected[name], rtol=1e-11, atol=1e-13) for name in expected)


def test_a_loss_scaler_does_not_leave_a_step_out_without_a_word() -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer, _ = world.wrap(*make(), scaler)
    for x, y in world.loader(DataLoader(data(), batch_size=8)):
        world.backward(scaler.scale(F.mse_loss(model(x), y)), more=True)
        with pytest.raises(SettingError, match=r"^GradScaler.step\(optimizer\) was called after world.backward"):
            scaler.step(optimizer)
        break


def _average_beside(workers: Workers) -> list[float]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    average = world.wrap(torch.optim.swa_utils.AveragedModel(model))
    for x, y in world.loader(DataLoader(data(40), batch_size=20), accumulate=2):
        world.backward(F.mse_loss(model(x), y))
        average.update_parameters(model)
        optimizer.step()
        optimizer.zero_grad()
    return [float(p.detach().sum()) for p in average.parameters()]


def test_an_average_may_follow_between_the_micro_batches_of_a_step(run_ranks: Ranks) -> None:
    one, two = run_ranks(_average_beside, 2)
    assert one == two
