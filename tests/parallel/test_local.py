"""Workers that step by themselves: against a plain transcription, saved and resumed anywhere, and shown as one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo import checkpoint
from stormo.checkpoint.reader import Reader
from stormo.cli import main
from stormo.data.loaders import ResidentLoader, Share
from stormo.data.order import derive_seed
from stormo.distributed.world import World
from stormo.parallel.local import Local
from stormo.training.loop import train
from tests.parallel.test_server import Odd
from tests.tiny_run import Parts, arrays, assert_same_bits, build, optimizer_arrays, save, steps, whole_state
from tests.tiny_task import Tiny, TinyOptions, points
from tests.training.test_divergence import assemble

Ranks = Callable[..., list[Any]]
FLAGS: dict[str, Any] = {"strategy": "local", "global_batch_size": 16}
TASK = str(Path(__file__).parent.with_name("tiny_task.py"))


def _weights(parts: Parts) -> dict[str, Any]:
    return arrays((part.name, part.local) for part in parts.strategy.shards())


def _mean(parts: Parts) -> dict[str, Any]:
    """What a checkpoint would hold; all workers call it."""
    assert isinstance(parts.strategy, Local)
    names = [name for name, _ in parts.strategy.module.named_parameters()]
    return arrays((name, mean.clone()) for name, mean in zip(names, parts.strategy.mean_weights(), strict=True))


def _trained(
    world: World, options: dict[str, Any], flags: dict[str, Any], num: int, task: type[Tiny] = Tiny
) -> tuple[Any, list[float]]:
    parts = build(world, options, task_class=task, **flags)
    parts.strategy.warm_up(parts.loader)
    losses = steps(parts, num)
    return _weights(parts), losses


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Tiny, Odd])
def test_sgd_averaged_in_every_step_is_that_of_ddp(run_ranks: Ranks, task: type[Tiny]) -> None:
    options = {"num_train": 34, "dropout": 0.0, "norm": False}  # 16, 16, 2: the third worker is left without a sample
    flags = {"precision": "fp64", "momentum": 0.0, "global_batch_size": 16}
    flags |= {"gradient_noise": 0.01} if task is Tiny else {"channels_last": True}
    expected, losses = run_ranks(_trained, 3, options, {**flags, "strategy": "ddp"}, 7, task)[0]
    for weights, own_losses in run_ranks(_trained, 3, options, {**flags, **FLAGS, "average_every": "1"}, 7, task):
        np.testing.assert_allclose(own_losses, losses, rtol=1e-12)
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-12, err_msg=name)


def _transcribed(size: int, num_train: int, flags: dict[str, Any], num: int, due: set[int]) -> list[dict[str, Any]]:
    """The same training of all workers, one after the other in this process; the weights of each at the end."""
    torch.manual_seed(derive_seed(0, "model"))
    torch.set_default_dtype(torch.float64)
    models = [Tiny(TinyOptions(dropout=0.0, norm=False)).model()]
    models += [copy.deepcopy(models[0]) for _ in range(size - 1)]
    if flags.get("optimizer") == "adamw":
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.0) for model in models
        ]
    else:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    shares = [Share(global_batch_size=16, accumulate=1, worker=rank, num_workers=size) for rank in range(size)]
    data, device = points(num_train, 0), torch.device("cpu")
    loaders = [ResidentLoader(data, share, 0, 2, lambda batch, draws: batch, device) for share in shares]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(a) for a in anchor]
    done = 0
    for epoch in range(1, 99):
        for batches in zip(*(loader.epoch(epoch, 0) for loader in loaders), strict=True):
            for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                x, y = batch.data
                (cross_entropy(model(x.double()), y) * batch.weight * size).backward()
                optimizer.step()
            done += 1
            if done in due:
                _average(models, anchor, velocity, flags.get("outer_lr", 1.0), flags.get("outer_momentum", 0.0))
            if done == num:
                return [arrays(model.named_parameters()) for model in models]
    raise AssertionError("epochs never end")


@torch.no_grad()
def _average(
    models: list[nn.Module], anchor: list[Tensor], velocity: list[Tensor], rate: float, momentum: float
) -> None:
    for index, each in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        change = anchor[index] - torch.stack(each).mean(dim=0)
        velocity[index] = momentum * velocity[index] + change
        anchor[index] = anchor[index] - rate * (change + momentum * velocity[index])
        for parameter in each:
            parameter.copy_(anchor[index])


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ({"average_every": "3"}, {3, 6}),
        ({"average_every": "3", "optimizer": "adamw", "outer_lr": 0.7, "outer_momentum": 0.9}, {3, 6}),
        ({"average_every": "0.7ep", "outer_lr": 0.5}, {2, 4, 6, 8}),  # of three steps an epoch
        ({"average_every": "2ep"}, {6}),
    ],
    ids=["sgd", "adamw and an outer step", "parts of epochs", "epochs"],
)
def test_each_worker_has_the_weights_of_a_plain_transcription(
    run_ranks: Ranks, flags: dict[str, Any], due: set[int]
) -> None:
    try:
        expected = _transcribed(3, 37, flags, 8, due)  # batches of 16, 16 and 5
    finally:
        torch.set_default_dtype(torch.float32)
    options = {"num_train": 37, "dropout": 0.0, "norm": False}
    trained = run_ranks(_trained, 3, options, {**FLAGS, "precision": "fp64", **flags}, 8)
    for (weights, _), own in zip(trained, expected, strict=True):
        for name, value in own.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-11, err_msg=name)
    replicas_differ = not np.array_equal(trained[0][0]["0.weight"], trained[1][0]["0.weight"])
    assert replicas_differ is (8 not in due)  # after an averaging they are equal to the last bit


class OwnBeginning(Tiny):
    """A model whose first weights are drawn anew on every worker."""

    def model(self) -> nn.Module:
        torch.seed()
        return super().model()


def _beginning(world: World) -> dict[str, Any]:
    return _weights(build(world, {}, task_class=OwnBeginning, **FLAGS))


def test_all_workers_start_with_the_weights_of_rank_0(run_ranks: Ranks) -> None:
    first, second = run_ranks(_beginning, 2)
    assert_same_bits(first, second)


def _shown(world: World) -> tuple[Any, ...]:
    parts = build(world, {"num_train": 40}, **FLAGS, average_every="3")
    steps(parts, 4)
    before = whole_state(parts)
    with parts.strategy.swap_in_mean_weights():
        shown = _weights(parts)
    assert_same_bits(whole_state(parts), before)
    assert_same_bits(_mean(parts), shown)
    assert_same_bits(whole_state(parts), before)
    return _weights(parts), shown


def test_the_mean_is_validated_and_workers_keep_their_weights(run_ranks: Ranks) -> None:
    results = run_ranks(_shown, 3)
    for name in results[0][0]:
        mean = np.mean([own[name].astype(np.float64) for own, _ in results], axis=0)
        for own, shown in results:
            assert np.array_equal(shown[name], results[0][1][name])
            assert not np.array_equal(shown[name], own[name])
            np.testing.assert_allclose(shown[name], mean, rtol=0, atol=1e-6)


# --- saved and resumed ------------------------------------------------------------------------------------------------


def _everything(parts: Parts) -> dict[str, Any]:
    assert isinstance(parts.strategy, Local)
    outer = parts.strategy.outer
    kept = {} if outer is None else {"anchor": outer.anchors, "velocity": outer.velocities}
    named = arrays((f"{key}/{n}", t) for key, each in kept.items() for n, t in enumerate(each))
    return {**whole_state(parts), **named, "replicas_differ": parts.strategy.replicas_differ}


def _whole_and_resumed(world: World, folder: str, flags: dict[str, Any], saved_at: int) -> tuple[Any, Any, Any, Any]:
    options = {"num_train": 40, "dropout": 0.3, "jitter": True}
    whole = build(world, options, **flags)
    whole.strategy.warm_up(whole.loader)
    steps(whole, saved_at)
    path = save(whole, folder)
    losses = steps(whole, 8 - saved_at)
    torch.manual_seed(99)
    resumed = build(world, options, **flags)
    resumed.strategy.warm_up(resumed.loader)
    resumed.state.restore(world, Path(path), 0)
    assert resumed.strategy.notices == []
    losses_again = steps(resumed, 8 - saved_at)
    return losses, losses_again, {**_everything(whole), **_mean(whole)}, {**_everything(resumed), **_mean(resumed)}


@pytest.mark.parametrize(
    ("flags", "saved_at"),
    [
        ({}, 5),  # between two averagings
        ({"optimizer": "adamw", "outer_momentum": 0.9}, 4),  # and right after one
        ({"precision": "fp16", "outer_lr": 0.7}, 2),
        ({}, 0),  # before the first step: there is no state in the optimizers yet
    ],
    ids=["between", "averaged", "fp16", "at the start"],
)
def test_a_resumed_run_is_the_whole_run_to_the_last_bit(
    run_ranks: Ranks, tmp_path: Path, flags: dict[str, Any], saved_at: int
) -> None:
    flags = {**FLAGS, "average_every": "4", **flags}
    for losses, losses_again, end, end_again in run_ranks(_whole_and_resumed, 3, str(tmp_path), flags, saved_at):
        assert losses == losses_again
        assert_same_bits(end, end_again)


def _saved(world: World, folder: str, flags: dict[str, Any], num: int) -> tuple[str, Any, Any]:
    parts = build(world, {"num_train": 40}, **flags)
    steps(parts, num)
    return save(parts, folder), _weights(parts), optimizer_arrays(parts.strategy)


def _taken_up(world: World, path: str, flags: dict[str, Any]) -> tuple[Any, ...]:
    parts = build(world, {"num_train": 40}, **flags)
    parts.state.restore(world, Path(path), 0)
    taken = _weights(parts), optimizer_arrays(parts.strategy), list(parts.strategy.notices)
    outer = parts.strategy.outer if isinstance(parts.strategy, Local) else None
    anchor = None if outer is None else arrays([("anchor", outer.anchors[0]), ("velocity", outer.velocities[0])])
    losses = steps(parts, 3)
    assert np.isfinite(losses).all()
    return *taken, anchor


@pytest.mark.parametrize(("size", "strategy"), [(2, "local"), (3, "ddp"), (2, "fsdp"), (1, "single")])
def test_other_workers_and_strategies_resume_from_the_mean(
    run_ranks: Ranks, tmp_path: Path, size: int, strategy: str
) -> None:
    flags = {**FLAGS, "average_every": "2", "optimizer": "adamw", "outer_momentum": 0.9}
    saved = run_ranks(_saved, 3, str(tmp_path), flags, 3)
    model = checkpoint.load(saved[0][0]).model
    with Reader(Path(saved[0][0])) as reader:
        names = {n for r in range(3) for n in reader.local_entries(r) if n.endswith(("0.weight", "0.weight|step"))}
        means = [set(reader.rank_index(r)["model"]) for r in range(3)]
    assert all(means)  # none of the workers has held all of them
    assert not means[0] & means[1]
    assert names == {
        *("outer/anchor/0.weight", "outer/velocity/0.weight"),
        *(f"{rank}/{kind}" for rank in range(3) for kind in ("model/0.weight", "optimizer/0.weight|step")),
    }
    outer = {"outer_momentum": 0.9} if strategy == "local" else {}
    now = {"global_batch_size": 16, "strategy": strategy, "optimizer": "adamw", **outer}
    for weights, state, notices, anchor in run_ranks(_taken_up, size, saved[0][0], now):
        for name, own in saved[0][1].items():
            mean = np.mean([each[1][name].astype(np.float64) for each in saved], axis=0)
            assert not np.allclose(own, mean, atol=1e-6)
            np.testing.assert_allclose(model[name].numpy(), mean, rtol=0, atol=1e-6)
            if strategy != "fsdp":  # which has a part of it
                assert np.array_equal(weights[name], model[name].numpy())
                second = np.mean([each[2][f"{name}/exp_avg_sq"].astype(np.float64) for each in saved], axis=0)
                np.testing.assert_allclose(state[f"{name}/exp_avg_sq"], second, rtol=1e-5)
                assert state[f"{name}/step"] == 3
        assert len(notices) == 1
        assert "3 workers with local updates: the run resumes from the mean" in notices[0]
        if anchor is not None:  # the outer step goes on from where all were equal last
            assert not np.array_equal(anchor["anchor"], weights["0.weight"])
            assert anchor["velocity"].any()


def test_weights_that_were_just_averaged_are_stored_once(run_ranks: Ranks, tmp_path: Path) -> None:
    path, *_ = run_ranks(_saved, 2, str(tmp_path), {**FLAGS, "average_every": "2"}, 2)[0]
    with Reader(path) as reader:
        kinds = {name.split("/")[1] for rank in range(2) for name in reader.local_entries(rank)}
    assert kinds == {"optimizer"}


def test_a_ddp_run_resumes_with_local_updates(run_ranks: Ranks, tmp_path: Path) -> None:
    saved = run_ranks(_saved, 2, str(tmp_path), {"global_batch_size": 16, "strategy": "ddp"}, 3)
    now = {**FLAGS, "average_every": "2", "outer_momentum": 0.9}
    for weights, state, notices, anchor in run_ranks(_taken_up, 2, saved[0][0], now):
        assert_same_bits(weights, saved[0][1])
        assert_same_bits(state, saved[0][2])
        assert notices == []
        assert np.array_equal(anchor["anchor"], weights["0.weight"])
        assert not anchor["velocity"].any()


class Keeping(torch.optim.SGD):
    """Keeps a number and None besides its momentum, and None alone until it has stepped twice."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    num_steps = state.get("num_steps", 0) + 1
                    late = parameter.detach().clone() if num_steps > 1 else None
                    state |= {"num_steps": num_steps, "late": late, "never": None}


class Sometimes(Tiny):
    """A parameter that only the main worker's batches use at first, and one without elements."""

    find_unused = True
    is_used: bool

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("extra", nn.Parameter(torch.ones(3)))
        model.register_parameter("empty", nn.Parameter(torch.ones(0, 2)))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Keeping(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        extra: Tensor = model.extra  # type: ignore[assignment]
        empty: Tensor = model.empty  # type: ignore[assignment]
        return super().loss(model, batch) + empty.sum() + (extra.sum() if self.is_used else 0.0)


def _sometimes(world: World, folder: str) -> tuple[str, str, Any, Any]:
    parts = build(world, {"num_train": 40}, task_class=Sometimes, **FLAGS, average_every="9")
    assert isinstance(parts.task, Sometimes)
    parts.task.is_used = world.is_main
    steps(parts, 2)
    first = save(parts, folder)
    parts.task.is_used = True
    steps(parts, 1)
    before = optimizer_arrays(parts.strategy)
    path = save(parts, folder)
    parts.state.restore(world, Path(path), 0)
    return first, path, before, optimizer_arrays(parts.strategy)


def test_optimizer_state_that_differs_between_workers_is_saved(run_ranks: Ranks, tmp_path: Path) -> None:
    results = run_ranks(_sometimes, 2, str(tmp_path))
    for *_, before, after in results:
        assert_same_bits(before, after)
    (first, second, own, _), (*_, other, _) = results
    assert (own["extra/num_steps"], other["extra/num_steps"]) == (3, 1)
    keys = ("late", "momentum_buffer", "never=none", "num_steps=number")
    for path, num_steps, momentum in (
        (first, 2, np.full(3, 1.9)),  # of the one that has it
        (second, 2, (own["extra/momentum_buffer"] + other["extra/momentum_buffer"]) / 2),
    ):
        found = checkpoint.load(path).optimizer
        for name in ("empty", "extra"):
            assert sorted(each for each in found if each.startswith(f"{name}|")) == [f"{name}|{key}" for key in keys]
        np.testing.assert_allclose(found["extra|momentum_buffer"], momentum, rtol=1e-6)
        assert (int(found["extra|num_steps=number"]), found["empty|late"].shape) == (num_steps, (0, 2))
    assert np.array_equal(found["extra|late"], own["extra/late"])
    np.testing.assert_allclose(checkpoint.load(first).model["extra"], 1 - (0.1 * 1 + 0.1 * 1.9) / 2, rtol=1e-6)


def _run(world: World, folder: str, name: str, flags: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    parts, training, (recorder, *_) = assemble(world, folder, Tiny, run_name=name, keep_checkpoints=9, **flags)
    outcome = train(training)
    recorder.end(outcome.stopped_by)
    parts.loader.close()
    return dict(parts.state.progress.validation or {}), _weights(parts)


def test_a_run_ends_with_the_mean_that_was_validated(run_ranks: Ranks, tmp_path: Path) -> None:
    # Nine steps, of which the last comes after the last averaging; checkpoints after steps 2, 4, 6 and 8.
    flags = {"strategy": "local", "average_every": "4"}
    (validation, first), (_, second) = run_ranks(_run, 2, str(tmp_path), "whole", flags)
    assert not np.array_equal(first["0.weight"], second["0.weight"])
    saved = checkpoint.load(checkpoint.find(tmp_path / "whole" / "checkpoints")[0].path)
    torch.set_default_dtype(torch.float64)
    try:
        model = Tiny(TinyOptions()).model().eval()
        model.load_state_dict(saved.model)
        x, y = points(30, seed=1).tensors
        with torch.no_grad():
            loss = float(cross_entropy(model(x), y))
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss == pytest.approx(validation["loss"], rel=1e-12)
    # More epochs go on with what each worker had, as if the run had never ended.
    run_ranks(_run, 2, str(tmp_path), "longer", {**flags, "epochs": 4})
    run_ranks(_run, 2, str(tmp_path), "whole", {**flags, "epochs": 4, "resume": "whole"})
    digests = [
        json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"] for name in ("longer", "whole")
    ]
    assert digests[0] == digests[1]


def test_a_resume_keeps_the_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = f"train {TASK} --device cpu --task.num-train 96 --batch-size 32 --target-accuracy 2 --no-tensorboard"
    begin += " --checkpoint-every 2 --keep-checkpoints 9 --epochs 2 --run-name run"
    assert main(f"{begin} --strategy local --average-every 4 --outer-momentum 0.9".split()) == 0
    summary = tmp_path / "runs" / "run" / "summary.json"
    whole = json.loads(summary.read_text())
    step = "runs/run/checkpoints/step-00000002"
    capsys.readouterr()
    said = []
    for flags in ("", "--average-every 3", "--strategy single", "--strategy local"):
        assert main(["train", "--resume", step, "--device", "cpu", *flags.split()]) == 0
        out = capsys.readouterr().out.splitlines()
        said.append([line.partition("  ")[2].strip() for line in out if line.startswith(("changed", "strategy"))])
        if not flags:
            assert json.loads(summary.read_text())["weights_sha256"] == whole["weights_sha256"]
    local = "local: every worker steps with the gradient of its own samples"
    assert said[:2] == [[local], ["--average-every 3 (4 before)", local]]
    assert [lines[0] for lines in said[2:]] == ["--strategy single (local before)", "--strategy local (single before)"]
