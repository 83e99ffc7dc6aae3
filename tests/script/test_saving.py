"""A script that was saved and loaded comes to the very weights of one that never stopped."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError, StormoError
from stormo.launch import alone
from stormo.script.world import World
from tests.script.loops import Ranks, Weights, data, make, weights, world_of

NUM_EPOCHS = 3


def _one() -> Workers:
    return Workers(alone(), torch.device("cpu"))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for _ in range(38):
            yield torch.randn(4), torch.randn(2)


def _make_loader(world: World, kind: str) -> Any:
    if kind == "loader":
        return world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    if kind == "generator":
        generator = torch.Generator().manual_seed(11)
        return world.loader(DataLoader(data(), batch_size=8, shuffle=True, generator=generator))
    if kind == "stream":
        return world.loader(_Stream(), global_batch_size=8)
    if kind == "sharded":
        return world.loader(_Stream(), 4, sharded=True, accumulate=2)
    return world.loader(data(), global_batch_size=8, shuffle=True)


def _script(
    workers: Workers, folder: str, kind: str, dropout: float, save_at: int, stop: str, noise: int = 0
) -> tuple[Weights, list[list[float]], dict[str, Any]]:
    """Trains three epochs; saves at a step, and ends there if it should. Loads what is there first."""
    torch.manual_seed(noise)  # what is drawn before load() must not matter
    world = world_of(workers)
    model, optimizer = make(dropout)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    world.wrap(model, optimizer, scheduler)
    loader = _make_loader(world, kind)
    extra = world.load(folder)
    seen: list[list[float]] = []
    step = extra.get("step", 0)
    for epoch in range(extra.get("epoch", 0), NUM_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            if world._loop.is_accumulating:
                continue
            step += 1
            seen += [[float(epoch), *row.tolist()] for row in x[: loader.num_samples]]
            if step == save_at and stop == "inside":
                world.save(folder, epoch=epoch, step=step)
                return weights(model), seen, extra
            if step == save_at and stop == "after a break":
                world.request_stop()
                while not world.stop_requested:
                    pass
                break
        if world._loop.saw_stop:
            world.save(folder, epoch=epoch, step=step)
            return weights(model), seen, extra
        if stop == "between epochs" and epoch == 1:
            world.save(folder, epoch=epoch + 1, step=step)
            return weights(model), seen, extra
    return weights(model), seen, extra


def _rows(answers: list[Any]) -> list[Any]:
    return sorted(row for _, seen, _ in answers for row in seen)


@pytest.mark.parametrize(
    ("kind", "stop", "size"),
    [
        ("loader", "inside", 2),
        ("loader", "after a break", 2),
        ("loader", "between epochs", 2),
        ("generator", "inside", 1),
        ("set", "inside", 2),
        ("stream", "inside", 2),
        ("sharded", "inside", 2),
    ],
)
def test_a_script_resumes_to_the_same_bits(run_ranks: Ranks, tmp_path: Path, kind: str, stop: str, size: int) -> None:
    whole = run_ranks(_script, size, str(tmp_path / "whole"), kind, 0.3, 0, "")
    save_at = 8 if kind != "sharded" else 7  # in the second epoch
    folder = str(tmp_path / "cut")
    before = run_ranks(_script, size, folder, kind, 0.3, save_at, stop)
    after = run_ranks(_script, size, folder, kind, 0.3, 0, "", 99)
    for first, rest, uncut in zip(before, after, whole, strict=True):
        assert rest[2]["epoch"] == (2 if stop == "between epochs" else 1)
        assert first[1] + rest[1] == uncut[1]
        assert all(torch.equal(rest[0][name], value) for name, value in uncut[0].items())


@pytest.mark.parametrize("kind", ["loader", "set"])
def test_another_number_of_workers_resumes_with_the_same_samples(run_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    whole = run_ranks(_script, 2, str(tmp_path / "whole"), kind, 0.0, 0, "")
    folder = str(tmp_path / "cut")
    before = run_ranks(_script, 2, folder, kind, 0.0, 8, "inside")
    after = run_ranks(_script, 3, folder, kind, 0.0, 0, "", 99)
    assert sorted(_rows(before) + _rows(after)) == _rows(whole)
    for found, _, _ in after:
        assert all(torch.allclose(found[name], value, rtol=1e-10) for name, value in whole[0][0].items())


def test_a_save_at_the_last_batch_of_an_epoch_resumes_behind_it(tmp_path: Path) -> None:
    whole, every, _ = _script(_one(), str(tmp_path / "whole"), "loader", 0.3, 0, "")
    _, first, _ = _script(_one(), str(tmp_path / "cut"), "loader", 0.3, 5, "inside")
    found, rest, _ = _script(_one(), str(tmp_path / "cut"), "loader", 0.3, 0, "", 99)
    assert len(first) == 38
    # The epoch that the script was in is looked at again, and has no batch left.
    assert [row[1:] for row in first + rest] == [row[1:] for row in every]
    assert all(torch.equal(found[name], value) for name, value in whole.items())


EXTRA: dict[str, Any] = {
    "whole": 3,
    "best": float("inf"),
    "nothing": float("nan"),
    "text": "ä",
    "none": None,
    "true": True,
    "list": [1, [2.5, "x"]],
    "tuple": (1, (2,)),
    "set": {1, 2},
    "keys": {1: "one", (2, 3): "two", "three": OrderedDict(a=1)},
    "deque": deque([1, 2]),
    "counter": Counter("aab"),
    "tensor": torch.arange(6).view(2, 3),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "numpy": numpy.float32(0.5),
    "array": numpy.arange(3),
}


def test_extra_values_come_back_as_they_were(tmp_path: Path) -> None:
    world = world_of(_one())
    world.wrap(*make())
    assert world.load(tmp_path / "none") == {}
    world.save(tmp_path / "c", **EXTRA)
    found = world.load(tmp_path / "c")
    assert found.keys() == EXTRA.keys()
    for name, value in EXTRA.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
        elif isinstance(value, numpy.ndarray):
            assert (found[name] == value).all()
            assert found[name].dtype == value.dtype
        elif name == "nothing":
            assert found[name] != found[name]
        else:
            assert found[name] == value


def _save(folder: Path, step: int = 0) -> None:
    world = world_of(_one())
    model, optimizer = world.wrap(*make())
    loader = world.loader(DataLoader(data(), batch_size=8))
    world.load(folder)
    for number, (x, y) in enumerate(loader):
        if number == step:
            break
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        world.save(folder)


def _load_damaged(workers: Workers, folder: str) -> str:
    world = world_of(workers)
    world.wrap(*make())
    with pytest.raises(StormoError) as caught:
        world.load(folder)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_damaged_checkpoint_is_named_on_all_workers_with_the_way_out(run_ranks: Ranks, tmp_path: Path) -> None:
    _save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    file = tmp_path / "step-00000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(bytes(content))
    for sentence in run_ranks(_load_damaged, 2, str(tmp_path)):
        assert sentence.startswith(f"world.load('{tmp_path}') was called, but the newest checkpoint there is damaged")
        assert sentence.endswith(f"remove the folder {tmp_path}/step-00000002 to resume from step 1.")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    world = world_of(_one())
    model = nn.Linear(3, 3)
    world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _loader = world.loader(DataLoader(data(), batch_size=8))
    with pytest.raises(SettingError, match=r"was to be loaded, but it does not fit the model"):
        world.load(tmp_path)


def test_a_checkpoint_of_another_type_of_numbers_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    world = world_of(_one())
    model, optimizer = make()
    world.wrap(model.bfloat16(), optimizer)
    _loader = world.loader(DataLoader(data(), batch_size=8))
    with pytest.raises(SettingError, match=r"is of type float\d\d there and of type bfloat16 in the model; load"):
        world.load(tmp_path)


def test_loading_before_wrapping_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    world = world_of(_one())
    with pytest.raises(SettingError, match=r"when the script had 0 calls of world.wrap\(\), but .* holds 1; call it"):
        world.load(tmp_path)
    world.wrap(*make())
    with pytest.raises(SettingError, match=r"when the script had 0 training loaders, but .* holds 1; call it"):
        world.load(tmp_path)


def test_other_data_than_before_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    world = world_of(_one())
    world.wrap(*make())
    _loader = world.loader(DataLoader(data(20), batch_size=8))
    with pytest.raises(SettingError, match=r"whose loader 1 had 38 samples, but here it has 20"):
        world.load(tmp_path)


def test_saving_behind_the_checkpoints_of_another_run_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    world = world_of(_one())
    model, optimizer = world.wrap(*make())
    for x, y in world.loader(DataLoader(data(), batch_size=8)):
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        break
    with pytest.raises(SettingError, match=r"at step 1, but a checkpoint of step 3 is there that was not loaded"):
        world.save(tmp_path)


class _Broken(nn.Linear):
    """Cannot be saved on rank 0, for a reason of its own."""

    fails = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise KeyError("no such layer")
        return super().state_dict(*args, **kwargs)


def _fails_on_main(workers: Workers, folder: str) -> str:
    world = world_of(workers)
    model = world.wrap(_Broken(2, 2))
    model.fails = workers.is_main
    with pytest.raises(KeyError if workers.is_main else PeerFailedError) as caught:
        world.save(folder)
    return str(caught.value)


def test_any_error_of_rank_0_reaches_all_who_wait_for_it(run_ranks: Ranks, tmp_path: Path) -> None:
    assert all("no such layer" in said for said in run_ranks(_fails_on_main, 2, str(tmp_path)))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_a_model_keeps_besides_tensors_and_ties_comes_back(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        made = nn.Sequential(_WithExtraState(3, 3), nn.Linear(3, 3))
        made[1].weight = made[0].weight
        return made

    world = world_of(_one())
    first: Any = world.wrap(model())
    world.save(tmp_path)
    world = world_of(_one())
    second: Any = world.wrap(model())
    world.load(tmp_path)
    assert second[0].calls == 3
    assert second[1].weight is second[0].weight
    assert torch.equal(second[0].weight, first[0].weight)


def test_a_validation_that_was_under_way_restarts(tmp_path: Path) -> None:
    world = world_of(_one())
    world.wrap(*make())
    loader = world.loader(DataLoader(data(), batch_size=8))
    for number, _ in enumerate(loader):
        if number == 2:
            world.save(tmp_path)
            break
    world = world_of(_one())
    world.wrap(*make())
    loader = world.loader(DataLoader(data(), batch_size=8))
    world.load(tmp_path)
    assert sum(len(x) for x, _ in loader) == 38


def test_a_script_that_only_predicts_resumes_in_the_middle(tmp_path: Path) -> None:
    world = world_of(_one())
    loader = world.loader(DataLoader(data(), batch_size=8))
    for number, _ in enumerate(loader):
        if number == 2:
            world.save(tmp_path)
            break
    world = world_of(_one())
    loader = world.loader(DataLoader(data(), batch_size=8))
    world.load(tmp_path)
    assert sum(len(x) for x, _ in loader) == 38 - 16
    assert sum(len(x) for x, _ in loader) == 38


def _averaged(workers: Workers, folder: str, num_epochs: int) -> tuple[Weights, Weights]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make())
    average = world.wrap(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    loader = world.loader(DataLoader(data(), batch_size=8))
    for epoch in range(world.load(folder).get("epoch", 0), num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y))
            optimizer.step()
            average.update_parameters(model)
        world.save(folder, epoch=epoch + 1)
    return weights(model), weights(average)


def test_an_average_of_the_weights_is_saved_when_it_is_wrapped(run_ranks: Ranks, tmp_path: Path) -> None:
    whole = run_ranks(_averaged, 2, str(tmp_path / "whole"), 2)
    run_ranks(_averaged, 2, str(tmp_path / "cut"), 1)
    for found, uncut in zip(run_ranks(_averaged, 2, str(tmp_path / "cut"), 2), whole, strict=True):
        for here, there in zip(found, uncut, strict=True):
            assert all(torch.equal(here[name], value) for name, value in there.items())
        assert not torch.equal(found[1]["module.last.weight"], found[0]["last.weight"])


def test_a_save_is_whole_although_a_loss_left_gradients_in_a_model_that_has_stepped(tmp_path: Path) -> None:
    world = world_of(_one())
    generator, moves_generator = world.wrap(*make(has_norm=False))
    critic = nn.Linear(2, 1)
    critic, moves_critic = world.wrap(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    for x, real in world.loader(DataLoader(data(), batch_size=19)):
        fake = generator(x)
        moves_critic.zero_grad()
        world.backward((critic(fake.detach()) - critic(real)).mean())
        moves_critic.step()
        moves_generator.zero_grad()
        world.backward(-critic(fake).mean())
        moves_generator.step()
        world.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_another_optimizer_is_refused_at_load(tmp_path: Path) -> None:
    world = world_of(Workers(alone(), torch.device("cpu")))
    world.wrap(*make())
    world.save(tmp_path)
    model, _ = make()
    other = world_of(Workers(alone(), torch.device("cpu")))
    other.wrap(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(SettingError, match=r"has wrapped Adam, but .* holds the state of SGD; wrap the same ones"):
        other.load(tmp_path)


# Loops that are broken off, zipped or dropped; that keep batches, skip some, or step in their own way


def _train_loop(workers: Workers, folder: str, how: str, save_at: int = 0) -> tuple[Weights, list[int]]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    draws = torch.Generator().manual_seed(7)
    first = world.loader(DataLoader(data(), batch_size=8, shuffle=True, generator=draws))
    second = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    state = world.load(folder)
    num_steps = state.get("num_steps", 0)
    for epoch in range(state.get("epoch", 0), 3):
        for batches in zip(first, second, strict=False) if how == "zip" else ([batch] for batch in first):
            optimizer.zero_grad()
            world.backward(sum((F.mse_loss(model(x), y) for x, y in batches), torch.zeros(())))
            optimizer.step()
            num_steps += 1
            if num_steps == save_at:
                world.save(folder, epoch=epoch, num_steps=num_steps)
                return weights(model), []
            if how == "break" and first.num_behind == 3:
                break
        if how == "dropped" and epoch == 0:
            iter(first)  # draws, and is gone
            world.save(folder, epoch=1, num_steps=num_steps)
            if save_at:
                return weights(model), []
    return weights(model), draws.get_state().tolist()


@pytest.mark.parametrize(
    ("how", "save_at"),
    [("break", 1), ("break", 4), ("zip", 5), ("dropped", -1)],
)
def test_a_load_resumes_where_a_loop_is_broken_off_zipped_or_dropped(
    run_ranks: Ranks, tmp_path: Path, how: str, save_at: int
) -> None:
    whole = run_ranks(_train_loop, 2, str(tmp_path / "whole"), how)
    run_ranks(_train_loop, 2, str(tmp_path / "cut"), how, save_at)
    rest = run_ranks(_train_loop, 2, str(tmp_path / "cut"), how)
    for (uncut, _), (found, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(found[name], value) for name, value in uncut.items())
    assert rest[0][1] == whole[0][1], "rank 0 draws"


class _Sharpness(torch.optim.Optimizer):
    """Two backwards a batch: the second, at weights moved uphill, is what another optimizer inside of it steps with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def climb(self) -> None:
        self._moves = [0.05 * p.grad for p in self.param_groups[0]["params"]]
        for p, move in zip(self.param_groups[0]["params"], self._moves, strict=True):
            p.add_(move)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p, move in zip(self.param_groups[0]["params"], self._moves, strict=True):
            p.sub_(move)
        self.inner.step()
        self.zero_grad()


def _first_values(batch: list[Tensor], loader: Any) -> list[float]:
    return [float(row[0]) for row in batch[0][: loader.num_samples]]


def _sharpness(workers: Workers, folder: str, wraps: str, save_at: int = 0) -> tuple[list[float], Weights]:
    world = world_of(workers)
    model, _ = make(has_norm=False)
    optimizer = _Sharpness(model)
    world.wrap(model, optimizer if wraps == "the outer" else optimizer.inner)
    loader = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    world.load(folder)
    seen: list[float] = []
    for number, batch in enumerate(loader, 1):
        seen += _first_values(batch, loader)
        for move in (optimizer.climb, optimizer.descend):
            world.backward(F.mse_loss(model(batch[0]), batch[1]))
            move()
        if number == save_at:
            world.save(folder)
            break
    return seen, weights(model)


@pytest.mark.parametrize(("wraps", "size"), [("the outer", 3), ("the inner", 3)])
def test_a_batch_with_two_backwards_is_behind_a_save_whichever_optimizer_has_stepped(
    run_ranks: Ranks, tmp_path: Path, wraps: str, size: int
) -> None:
    whole = run_ranks(_sharpness, size, str(tmp_path / "whole"), wraps)
    first = run_ranks(_sharpness, size, str(tmp_path / "cut"), wraps, 2)
    rest = run_ranks(_sharpness, size, str(tmp_path / "cut"), wraps)
    assert sorted(value for seen, _ in first + rest for value in seen) == sorted(data().tensors[0][:, 0].tolist())
    if wraps == "the inner":  # whose momentum is saved then
        for (_, uncut), (_, found) in zip(whole, rest, strict=True):
            assert all(torch.equal(found[name], value) for name, value in uncut.items())


def _every_other(loader: Any) -> Iterator[Any]:
    """Passes batches over."""
    for number, batch in enumerate(loader):
        if number % 2:
            yield batch


def _hold(workers: Workers, folder: str, how: str, save_at: int = 0) -> list[list[float]]:
    """Trains with batches that come in another way than one by one; the first values of those that were, by step."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    loader = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    world.load(folder)
    seen: list[list[float]] = []
    pending = []
    for number, (x, y) in enumerate(_every_other(loader) if how == "passed over" else loader, 1):
        pending.append(F.mse_loss(model(x), y))
        if how == "added up" and number % 2:
            continue
        seen.append(x[:, 0].tolist())
        optimizer.zero_grad()
        world.backward(torch.stack(pending).sum())
        pending.clear()
        optimizer.step()
        if len(seen) == save_at:
            world.save(folder)
            break
    return seen


@pytest.mark.parametrize("how", ["passed over", "added up"])
def test_batches_that_are_passed_over_or_added_up_are_behind_a_save(run_ranks: Ranks, tmp_path: Path, how: str) -> None:
    whole = run_ranks(_hold, 2, str(tmp_path / "whole"), how)
    first = run_ranks(_hold, 2, str(tmp_path / "cut"), how, 1)
    rest = run_ranks(_hold, 2, str(tmp_path / "cut"), how)
    for seen, before, after in zip(whole, first, rest, strict=True):
        assert len(seen) > 1
        assert before + after == seen
