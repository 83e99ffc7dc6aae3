"""Whatever a loop does in another order than usual is right, or answered by a sentence, on any number of workers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from stormo.distributed.world import World as Workers
from stormo.errors import SettingError, StormoError
from stormo.launch import alone
from stormo.script.sharding import whole_tensors
from stormo.script.world import World
from tests.script.loops import Ranks, Weights, data, make, plain_loop, weights, world_loop, world_of


@pytest.fixture
def world() -> World:
    """A world of one worker."""
    torch.manual_seed(0)
    return world_of(Workers(alone(), torch.device("cpu")))


def _loader(world: World, batch_size: int = 8, **settings: Any) -> Any:
    return world.loader(DataLoader(data(), batch_size=batch_size, shuffle=True), **settings)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


# Each takes a world with a wrapped model and its optimizer, and makes a mistake; tests/mistakes has the commoner ones.


def a_number(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world):
        world.backward(_loss(model, batch).item())  # type: ignore[arg-type]


def no_gradient(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world):
        world.backward(_loss(model, batch).detach())


def two_loaders(world: World, model: nn.Module, optimizer: Any) -> None:
    for first, _ in zip(_loader(world), _loader(world, 4), strict=False):
        world.backward(_loss(model, first))


def iterated_twice_at_once(world: World, model: nn.Module, optimizer: Any) -> None:
    loader = _loader(world)
    list(zip(loader, loader, strict=True))


def save_between_micro_batches(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world, accumulate=2):
        world.backward(_loss(model, batch))
        optimizer.step()
        world.save("never")


def closure_of_micro_batches(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world, accumulate=2):

        def closure() -> Any:
            world.backward(_loss(model, batch))  # noqa: B023
            return 0.0

        optimizer.step(closure)


def load_in_a_loop(world: World, model: nn.Module, optimizer: Any) -> None:
    for _ in _loader(world):
        world.load("never")


def wrapped_twice(world: World, model: nn.Module, optimizer: Any) -> None:
    world.wrap(model, optimizer)


def no_optimizer(world: World, model: nn.Module, optimizer: Any) -> None:
    other = world.wrap(nn.Linear(4, 2))
    for batch in _loader(world):
        world.backward(_loss(other, batch))
        optimizer.zero_grad()
        world.save("never")


def no_model(world: World, model: nn.Module, optimizer: Any) -> None:
    world.wrap(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def data_in_wrap(world: World, model: nn.Module, optimizer: Any) -> None:
    world.wrap(nn.Linear(2, 2), DataLoader(data()))


def no_batch_size(world: World, model: nn.Module, optimizer: Any) -> None:
    world.loader(data())


def a_loader_with_settings(world: World, model: nn.Module, optimizer: Any) -> None:
    world.loader(DataLoader(data()), 3)


def small_batches(world: World, model: nn.Module, optimizer: Any) -> None:
    model.eval()  # one sample is too few for batch norm
    for batch in _loader(world, 2, accumulate=3):
        world.backward(_loss(model, batch))


def sum_of_text(world: World, model: nn.Module, optimizer: Any) -> None:
    world.sum("3")


def save_a_model(world: World, model: nn.Module, optimizer: Any) -> None:
    world.save("never", model=model)


def counts_of_nothing(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world):
        world.backward(_loss(model, batch), count=0)


def a_count_below_zero(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world):
        world.backward(_loss(model, batch), count=-1)


def save_in_an_inner_loop(world: World, model: nn.Module, optimizer: Any) -> None:
    inner = _loader(world)
    for _ in _loader(world):
        for number, batch in enumerate(inner):
            optimizer.zero_grad()
            world.backward(_loss(model, batch), loader=inner)
            optimizer.step()
            if number == 2:
                world.save("never")


def clears_between_losses(world: World, model: nn.Module, optimizer: Any) -> None:
    for batch in _loader(world, accumulate=2):
        world.backward(_loss(model, batch), more=True)
        optimizer.zero_grad()
        world.backward(_loss(model, batch))


REFUSED: dict[Callable[[World, nn.Module, Any], None], str] = {
    a_number: "world.backward() was given a float",
    no_gradient: "world.backward() was given a tensor of shape [] without a gradient",
    two_loaders: "world.backward() was called with several active loaders",
    iterated_twice_at_once: "loader 1 was iterated in test_stepping.py line ",
    save_between_micro_batches: "world.save() was called between world.backward() and optimizer.step()",
    closure_of_micro_batches: "optimizer.step(closure) was called with accumulate above 1",
    load_in_a_loop: "world.load() was called inside a loop over a loader",
    wrapped_twice: "world.wrap() was given 6 parameters for the second time",
    no_optimizer: "world.save() was called, but the optimizer was not passed to world.wrap()",
    no_model: "world.wrap() was called without a model, but it was given SGD",
    data_in_wrap: "world.wrap() was given a DataLoader",
    no_batch_size: "world.loader() was given batch_size=None and global_batch_size=None",
    a_loader_with_settings: "world.loader() was given a DataLoader and further settings",
    small_batches: "a model in training mode was given a batch of 2 samples, but 1 worker × 3 micro-batches need at ",
    sum_of_text: "a str was to be reduced over the workers",
    save_a_model: "a Net was to be saved (extra/0/model)",
    counts_of_nothing: "world.backward() was called with counts that add up to 0",
    a_count_below_zero: "world.backward(count=-1) was called",
    clears_between_losses: "zero_grad() was called between two losses of a batch with accumulate above 1",
    save_in_an_inner_loop: "world.save() was called in a training loop inside the loop over another loader",
}


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_answered_by_a_sentence(
    world: World, mistake: Callable[[World, nn.Module, Any], None], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = world.wrap(*make())
    with pytest.raises(SettingError) as caught:
        mistake(world, model, optimizer)
    assert str(caught.value).startswith(REFUSED[mistake])
    assert not (tmp_path / "never").exists()


def test_two_losses_of_a_batch_add_up(world: World) -> None:
    found = []
    for more in (True, False):
        model, optimizer = world.wrap(*make(has_norm=False))
        for batch in _loader(world):
            optimizer.zero_grad()
            world.backward(_loss(model, batch) / 2, more=more)
            world.backward(_loss(model, batch) / 2)
            optimizer.step()
        found.append(weights(model))
    expected = plain_loop(*make(has_norm=False), DataLoader(data(), batch_size=8, shuffle=True), 1)
    assert all(torch.allclose(each[name], value, rtol=1e-12) for each in found for name, value in expected.items())


def test_gradients_cleared_by_hand_are_clear(world: World) -> None:
    model, optimizer = world.wrap(*make())
    for number, batch in enumerate(_loader(world)):
        for parameter in model.parameters():
            if parameter.grad is not None and number % 2:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        world.backward(_loss(model, batch))
        optimizer.step()


def _orders(make: Callable[[DataLoader[Any]], Any], how: str, num_workers: int) -> list[list[float]]:
    """The first values of batches of two loaders: broken off, begun side by side, or with an iteration that is kept."""
    torch.manual_seed(3)
    generators = [torch.Generator().manual_seed(number) if how != "no generator" else None for number in (1, 2)]
    loaders = [
        make(DataLoader(data(), batch_size=8, shuffle=True, generator=generator, num_workers=num_workers))
        for generator in generators
    ]
    seen, kept = [], []
    for _ in range(3):
        both = [iter(loader) for loader in loaders]
        for number in range(1, 4):
            seen += [next(batches)[0][:, 0].tolist() for batches in both]
            if number == (2 if how == "broken off" else 3):
                break
        if how == "kept":
            kept.append(both)
        if how == "no generator":  # to the end
            seen += [x[:, 0].tolist() for batches in both for x, _ in batches]
        del both
    return [*seen, torch.rand(2).tolist()]


@pytest.mark.parametrize(
    ("how", "num_workers"),
    [("no generator", 0), ("broken off", 0), ("kept", 0), ("broken off", 1)],
)
def test_loaders_that_are_broken_off_or_begun_side_by_side_draw_what_those_of_torch_do(
    world: World, how: str, num_workers: int
) -> None:
    assert _orders(world.loader, how, num_workers) == _orders(lambda loader: loader, how, num_workers)


def test_a_first_look_at_a_batch_changes_nothing_of_what_follows(world: World) -> None:
    model, optimizer = world.wrap(*make())
    loader = _loader(world)
    kept = iter(loader)
    next(kept)  # the iterator stays in a variable, as in a notebook
    found = world_loop(world, model, optimizer, loader, 1)
    other_model, other_optimizer = make()
    other = DataLoader(data(), batch_size=8, shuffle=True)
    next(iter(other))
    expected = plain_loop(other_model, other_optimizer, other, 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _validate_inside(workers: Workers) -> tuple[Weights, list[int]]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    loader = _loader(world)
    counts = []
    for batch in loader:
        optimizer.zero_grad()
        world.backward(_loss(model, batch))
        optimizer.step()
        model.eval()
        # A loader of its own every time, as a function that validates would make it.
        counts.append(world.sum(sum(len(x) for x, _ in world.loader(DataLoader(data(11), batch_size=4)))))
        model.train()
    return weights(model), counts


def test_a_validation_inside_the_training_loop_changes_nothing(run_ranks: Ranks) -> None:
    expected = plain_loop(*make(), DataLoader(data(), batch_size=8, shuffle=True), 1)
    for found, counts in run_ranks(_validate_inside, 3):
        assert counts == [11] * 5
        assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in expected.items())


def _two_at_once(workers: Workers) -> Weights:
    """Two loaders side by side, a backward in a helper thread, and an error that the script catches on all workers."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    first, second = _loader(world), _loader(world, 4)
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        optimizer.zero_grad()
        try:
            if number == 1:
                raise KeyError("a sample that cannot be used")
            world.backward(_loss(model, one), loader=first, more=True)
        except KeyError:
            continue
        thread = threading.Thread(target=world.backward, args=(_loss(model, other),), kwargs={"loader": second})
        thread.start()
        thread.join()
        optimizer.step()
    return weights(model)


def test_loaders_side_by_side_weigh_each_by_its_own(run_ranks: Ranks) -> None:
    (alone,) = run_ranks(_two_at_once, 1)
    for found in run_ranks(_two_at_once, 3):
        assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in alone.items())


def _adversaries(workers: Workers, accumulate: int) -> Weights:
    """The generator's gradients are cleared between the critic's loss and its own, in both of torch's ways."""
    world = world_of(workers)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    generator, generator_optimizer = world.wrap(*_with_sgd(nn.Linear(4, 3)))
    critic, critic_optimizer = world.wrap(*_with_sgd(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))))
    for number, (x, y) in enumerate(world.loader(DataLoader(data(32), batch_size=8), accumulate=accumulate)):
        fake = generator(x)
        critic_optimizer.zero_grad()
        world.backward((critic(fake.detach()) - y[:, :1]).square().mean(), more=True)
        generator_optimizer.zero_grad(set_to_none=number % 3 != 0)
        world.backward(critic(fake).square().mean())
        generator_optimizer.step()
        critic_optimizer.step()
    return weights(nn.ModuleList([generator, critic]))


def _with_sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.SGD]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _plain_adversaries() -> Weights:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    generator, generator_optimizer = _with_sgd(nn.Linear(4, 3))
    critic, critic_optimizer = _with_sgd(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    for x, y in DataLoader(data(32), batch_size=8):
        fake = generator(x)
        critic_optimizer.zero_grad()
        (critic(fake.detach()) - y[:, :1]).square().mean().backward()
        generator_optimizer.zero_grad()
        critic(fake).square().mean().backward()
        generator_optimizer.step()
        critic_optimizer.step()
    return weights(nn.ModuleList([generator, critic]))


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_gradients_are_cleared_between_two_losses_of_a_step(run_ranks: Ranks, size: int, accumulate: int) -> None:
    expected = _plain_adversaries()
    for found in run_ranks(_adversaries, size, accumulate):
        assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-14) for name, value in expected.items())


def _kept_gradients(workers: Workers, change: str) -> Weights:
    """Gradients stay from step to step, as they are or changed."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    for batch in world.loader(DataLoader(data(), batch_size=8), accumulate=2):
        world.backward(_loss(model, batch), count=len(batch[0]) if change == "counted" else None)
        if change == "clipped":
            world.clip_grad_norm(model.parameters(), 0.3)
        optimizer.step()
        if change == "decayed" and world.is_last_micro_batch:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
    return weights(model)


def _plain_kept_gradients(change: str) -> Weights:
    model, optimizer = make(has_norm=False)
    for batch in DataLoader(data(), batch_size=8):
        _loss(model, batch).backward()
        if change == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        if change == "decayed":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
    return weights(model)


@pytest.mark.parametrize("change", ["", "clipped", "decayed", "counted"])
@pytest.mark.parametrize("size", [1, 3])
def test_kept_gradients_count_once(run_ranks: Ranks, size: int, change: str) -> None:
    expected = _plain_kept_gradients(change)
    for found in run_ranks(_kept_gradients, size, change):
        assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in expected.items())


def _breaks_inside_a_step(workers: Workers, strategy: Any, clears_first: bool) -> Weights:
    """The second epoch starts after a break between two micro-batches, whose gradient is cleared or stays."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False), strategy=strategy)
    loader = world.loader(DataLoader(data(32), batch_size=8), accumulate=2)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            if clears_first:
                optimizer.zero_grad()
            world.backward(_loss(model, batch))
            optimizer.step()
            if number == 2 - epoch:  # in the middle of the second step; at the end of the first
                break
            if not clears_first:
                optimizer.zero_grad()
    return whole_tensors(model.state_dict(), workers)


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_step_that_a_break_has_cut_off(run_ranks: Ranks, size: int, strategy: str, clears_first: bool) -> None:
    model, optimizer = make(has_norm=False)
    first, second, *_ = DataLoader(data(32), batch_size=8)
    for _ in range(2):
        optimizer.zero_grad()
        if not clears_first and optimizer.state:
            half = [tensor[:4] for tensor in second]  # the micro-batch before the break
            (_loss(model, half) / 2).backward()
        _loss(model, first).backward()
        optimizer.step()
    expected = weights(model)
    found, *_ = run_ranks(_breaks_inside_a_step, size, strategy, clears_first)
    assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in expected.items())


# What goes wrong on some of the workers only; the sentences that all of them raise.


def _break_on_one(world: World, model: nn.Module, optimizer: Any) -> None:
    for number, batch in enumerate(_loader(world)):
        optimizer.zero_grad()
        world.backward(_loss(model, batch))
        optimizer.step()
        if world.rank == 1 and number == 1:
            break
    world.sum(1)


def _skip_on_one(world: World, model: nn.Module, optimizer: Any) -> None:
    for number, batch in enumerate(_loader(world)):
        optimizer.zero_grad()
        loss = _loss(model, batch)
        if world.rank == 1 and number == 1:
            continue
        world.backward(loss)
        optimizer.step()


def _sum_on_main(world: World, model: nn.Module, optimizer: Any) -> None:
    if world.is_main:
        world.sum(1.0)
    world_loop(world, model, optimizer, _loader(world))


def _save_on_main(world: World, model: nn.Module, optimizer: Any) -> None:
    world_loop(world, model, optimizer, _loader(world), 1)
    if world.is_main:
        world.save("never")
    world.barrier()


def _sum_in_uneven_validation(world: World, model: nn.Module, optimizer: Any) -> None:
    model.eval()
    for x, _ in world.loader(DataLoader(data(10), batch_size=3)):
        world.sum(len(x))
    world.sum(0)


def _sum_of_other_keys(world: World, model: nn.Module, optimizer: Any) -> None:
    world.sum({"loss": 1.0} if world.is_main else {"accuracy": 1.0})


def _two_sums(world: World, model: nn.Module, optimizer: Any) -> None:
    if world.is_main:
        world.sum(1)
    world.sum(2)


DIFFERENT: dict[Callable[[World, nn.Module, Any], None], tuple[str, ...]] = {
    _break_on_one: ("world.backward in", "the batch at sample 16 of epoch 1 of loader 1 in", "world.sum of a number"),
    _skip_on_one: ("world.backward in", "the batch at sample 16 of epoch 1 of loader 1 in"),
    _sum_on_main: ("world.sum of a number in", "world.loader in"),
    _save_on_main: ("world.save in", "world.barrier in"),
    _sum_in_uneven_validation: ("world.sum of a number in", "world.sum of a number in"),
    _sum_of_other_keys: ("world.sum of {'loss': a number} in", "world.sum of {'accuracy': a number} in"),
    _two_sums: ("world.sum of a number in", "world.sum of a number in"),
}


def _differ(workers: Workers, script: Callable[[World, nn.Module, Any], None], has_norm: bool) -> list[str]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=has_norm))
    sentences = []
    for _ in range(2):  # whoever catches it gets it again: the workers are no longer in step
        with pytest.raises(StormoError) as caught:
            script(world, model, optimizer)
        sentences.append(str(caught.value))
    return sentences


@pytest.mark.parametrize(
    ("script", "has_norm"), [*((script, False) for script in DIFFERENT), (_break_on_one, True), (_skip_on_one, True)]
)
def test_workers_that_part_all_raise_the_lines_they_are_at(
    run_ranks: Ranks, script: Callable[[World, nn.Module, Any], None], has_norm: bool
) -> None:
    first, second = run_ranks(_differ, 2, script, has_norm)
    assert first == second
    assert first[0] == first[1]
    assert first[0].startswith("rank 0 is at: ")
    assert "rank 1 is at: " in first[0]
    assert first[0].count("test_stepping.py line ") + first[0].count("loops.py line ") == 2
    assert sum(words in first[0] for words in DIFFERENT[script]) >= 2 - (len(set(DIFFERENT[script])) == 1)


def _foreign_gradient(workers: Workers) -> str:
    world = world_of(workers)
    model, _ = world.wrap(*make())
    for batch in _loader(world):
        _loss(model, batch).backward()
        with pytest.raises(SettingError) as caught:
            world.backward(_loss(model, batch))
        break
    return str(caught.value)


def test_a_gradient_of_another_kind_is_refused(run_ranks: Ranks) -> None:
    for sentence in run_ranks(_foreign_gradient, 2):
        assert sentence.startswith("world.backward() was called on top of gradients that did not come from it")


def _plateau(workers: Workers, is_same: bool) -> str:
    world = world_of(workers)
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    world.wrap(model, optimizer, scheduler)
    try:
        for number in range(3):
            scheduler.step(math.nan if is_same else float(-number * world.rank))
        next(iter(_loader(world)))
    except SettingError as error:
        return str(error)
    return ""


def test_a_learning_rate_that_follows_one_workers_metric_is_refused(run_ranks: Ranks) -> None:
    assert run_ranks(_plateau, 2, True) == ["", ""]
    first, second = run_ranks(_plateau, 2, False)
    assert first == second
    assert first.startswith("the learning rate of optimizer 1, group 1 is ")


def _stop(workers: Workers, asks: int) -> list[int]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    seen = []
    for number, batch in enumerate(_loader(world, 4)):
        optimizer.zero_grad()
        world.backward(_loss(model, batch))
        optimizer.step()
        if world.rank == asks and number == 2:
            world.request_stop()
        if world.stop_requested:
            seen.append(number)
            break
    return [*seen, world.exit_code]


def test_a_stop_is_seen_by_all_at_the_same_batch(run_ranks: Ranks) -> None:
    for asks in (0, 1):
        answers = run_ranks(_stop, 3, asks)
        assert answers == [answers[0]] * 3
        assert answers[0][0] in (2, 3)
        assert answers[0][1] == 0
    assert run_ranks(_stop, 1, 0) == [[2, 0]] or run_ranks(_stop, 1, 0) == [[3, 0]]
