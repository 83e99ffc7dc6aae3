"""The time a worker stands still for the gradients of others: true where the truth is known, no trace in training.

A step that one worker cannot capture is captured by none.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from stormo.config.link import Link
from stormo.data.loaders import Batch
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import synchronised_norms
from stormo.parallel import base, ddp, fsdp
from stormo.parallel.base import Strategy
from stormo.parallel.ddp import AfterBackward, DataParallel, Ddp
from tests.tiny_run import assert_same_bits, build, steps, whole_state
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
SLEEP_S, NUM_STEPS = 0.2, 2


class Sleepy(Tiny):
    """Rank 1 sleeps between forward and backward; when it woke up is kept, by the clock of this machine."""

    is_slow = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if self.is_slow:
            time.sleep(SLEEP_S)
            self.woke_s.append(time.perf_counter())
        return loss

    woke_s: list[float]


def _spans(world: World, measures: bool) -> dict[str, Any]:
    """When this rank stood still in each step, and when it woke up from its sleep."""
    parts = build(world, {"num_train": 64}, task_class=Sleepy, global_batch_size=8, noise_scale=measures)
    task, strategy = parts.task, parts.strategy
    assert isinstance(task, Sleepy)
    parts.strategy.warm_up(parts.loader)
    assert strategy.exposed_s == 0.0  # what the first passes have waited is not of the training
    task.is_slow, task.woke_s = world.rank == 1, []
    still: list[tuple[float, float]] = []
    for _ in range(NUM_STEPS):
        before_s = strategy.exposed_s
        steps(parts, 1)
        began_s = strategy.exposed._began_s
        assert strategy.exposed_s is not None
        assert before_s is not None
        still.append((began_s, began_s + strategy.exposed_s - before_s))
    return {"still": still, "woke_s": task.woke_s, "exposed_s": strategy.exposed_s}


@pytest.mark.parametrize("measures", [True, False], ids=["beside the noise scale", "alone"])
def test_the_exposed_wait_is_that_of_the_fast_worker(run_ranks: Ranks, measures: bool) -> None:
    fast, slow = run_ranks(_spans, 2, measures)
    assert not fast["woke_s"]
    for (began_s, ended_s), woke_s, (slow_began_s, _) in zip(fast["still"], slow["woke_s"], slow["still"], strict=True):
        # No sum can be there before the sleeper has given its part, and no clock is asked twice for the same moment.
        assert ended_s >= woke_s
        assert began_s <= ended_s
        assert slow_began_s >= woke_s  # its sleep is its own work
    assert slow["exposed_s"] < fast["exposed_s"]


def _train(world: World, is_watched: bool, flags: dict[str, Any]) -> dict[str, Any]:
    watched = Ddp._backward
    if not is_watched:
        Ddp._backward = Strategy._backward  # type: ignore[method-assign]
    try:
        parts = build(world, {"num_train": 37, "norm": False}, global_batch_size=16, **flags)
        parts.strategy.warm_up(parts.loader)
        steps(parts, 6)
    finally:
        Ddp._backward = watched  # type: ignore[method-assign]
    assert (parts.strategy.exposed_s == 0.0) is not is_watched
    return whole_state(parts)


@pytest.mark.parametrize("noise_scale", [True, False])
def test_measuring_does_not_change_a_bit_of_the_training(run_ranks: Ranks, noise_scale: bool) -> None:
    flags = {"accumulate": 2, "precision": "fp16", "noise_scale": noise_scale}
    for plain, watched in zip(run_ranks(_train, 3, False, flags), run_ranks(_train, 3, True, flags), strict=True):
        assert_same_bits(plain, watched)


def _num_watched(world: World) -> int:
    parts, count = build(world, global_batch_size=16, accumulate=2), list[Tensor]()
    watch = parts.strategy.exposed.watch_backward
    parts.strategy.exposed.watch_backward = lambda loss: (count.append(loss.detach()), watch(loss))[1]  # type: ignore[method-assign]
    steps(parts, 3)
    parts.strategy.try_step(next(parts.loader.first_and_last()).data)  # no word to the other worker
    return len(count)


def test_only_the_micro_batch_with_an_exchange_is_measured(run_ranks: Ranks) -> None:
    assert run_ranks(_num_watched, 2) == [3, 3]


def _bucket_bytes(world: World, bucket_mb: int | None) -> int:
    world.link = Link(world_size=2, bucket_mb=bucket_mb)
    return int(build(world, global_batch_size=16).strategy._replica.bucket_bytes_cap)


def test_buckets_have_the_size_that_suits_the_link(run_ranks: Ranks) -> None:
    assert run_ranks(_bucket_bytes, 2, 8) == [8 << 20] * 2
    assert run_ranks(_bucket_bytes, 2, None) == [25 << 20] * 2


def _alone(world: World) -> float | None:
    parts = build(world)
    steps(parts, 2)
    return parts.strategy.exposed_s


def test_one_worker_does_not_wait(run_ranks: Ranks) -> None:
    assert run_ranks(_alone, 1) == [0.0]


def test_a_strategy_that_does_not_measure_has_no_exposed_wait() -> None:
    strategy = DataParallel.__new__(DataParallel)
    assert strategy.exposed_s is None
    assert not strategy.measures_exposed_wait
    assert Ddp.measures_exposed_wait


def _refused(world: World) -> list[str]:
    """What this rank says where rank 1 cannot capture its batch."""
    parts = build(world, {"num_train": 16}, global_batch_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "batch_obstacle", lambda data: "a batch holds a number" if world.rank else None)
        patch.setattr(parts.strategy, "_plan", replace(parts.plan, graph=True))
        patch.setattr(parts.strategy, "_capture", lambda batch: pytest.fail("nothing may be captured"))
        parts.strategy.warm_up(parts.loader)
    return parts.strategy.notices


def test_a_batch_that_one_worker_cannot_capture_is_captured_by_none(run_ranks: Ranks) -> None:
    said = "Steps are run by Python, not replayed as a CUDA graph: a batch holds a number."
    assert run_ranks(_refused, 2) == [[said]] * 2


def _refused_in_its_capture(world: World, name: str) -> tuple[list[str], bool, int]:
    """Why rank 1 could not capture, as this rank hears it, whether a graph is left, and the passes before."""
    parts = build(world, {"num_train": 16}, global_batch_size=8, strategy=name)
    strategy, run, num_passes, refusals = parts.strategy, parts.strategy._forward_backward, 0, list[str]()

    def count(*arguments: Any) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        return run(*arguments)

    def capture_but_on_rank_1(self: Strategy, batch: Batch) -> str | None:
        if world.rank == 1:
            return "it waits"
        self._graph = object()  # type: ignore[assignment]
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "frees_weights", lambda *_: False)  # on a CPU it is True
        patch.setattr(Strategy, "_capture", capture_but_on_rank_1)
        patch.setattr(base, "batch_obstacle", lambda data: None)
        patch.setattr(strategy, "_plan", replace(parts.plan, graph=True))
        patch.setattr(strategy, "_forward_backward", count)
        patch.setattr(strategy, "_refuse_graph", refusals.append)
        strategy.warm_up(parts.loader, [next(iter(parts.loader.epoch(1)))])
    return refusals, strategy._graph is not None, num_passes


@pytest.mark.parametrize(("strategy", "num_passes"), [("ddp", 13), ("fsdp", 1)])
def test_a_capture_that_fails_on_one_worker_leaves_no_graph(run_ranks: Ranks, strategy: str, num_passes: int) -> None:
    assert run_ranks(_refused_in_its_capture, 2, strategy) == [(["it waits"], False, num_passes)] * 2


class Branches(Tiny):
    """Each worker takes one of two branches before a batch norm that all share."""

    find_unused = True

    def model(self) -> nn.Module:
        return Forked(2**14)  # so that in fp64 each branch fills a bucket of 1 MiB


class Forked(nn.Module):
    """Two branches and a common end.

    Buckets are in the reverse order of parameters. Hence the bucket of an unused branch is sent before the statistics
    of backward, and the bucket of a used one after them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.end = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
        self.branches = nn.ModuleList(nn.Linear(8, width) for _ in range(2))
        self.place = 0

    def forward(self, points: Tensor) -> Tensor:
        """Score points, all by the same branch."""
        return cast(Tensor, self.end(self.branches[self.place](points)))


def _recorded(calls: list[str], name: str, call: Callable[[Any], Any], argument: Any) -> Any:
    calls.append(name)
    return call(argument)


def trained_branches(world: World, through_host: bool = False) -> list[list[Any]]:
    """The weights before and after; with NCCL, statistics are summed through host memory or by a communicator."""
    world.link = Link(world_size=world.size, bucket_mb=1)
    flags = {"sync_batch_norm": True, "precision": "fp64", "strategy": "ddp"}
    calls: list[str] = []  # s: statistics are summed, g: gradients are averaged
    with pytest.MonkeyPatch.context() as patch:
        if not through_host:
            patch.setattr(base, "open_host_sum", lambda *_: None)
        patch.setattr(
            ddp,
            "AfterBackward",
            lambda average, *others: AfterBackward(partial(_recorded, calls, "g", average), *others),
        )
        parts = build(world, {"num_train": 256}, task_class=Branches, global_batch_size=16, **flags)
    model = parts.strategy.module
    assert isinstance(model, Forked)
    model.place = world.rank % 2
    for _, norm in synchronised_norms(model):
        norm.reduce = partial(_recorded, calls, "s", norm.reduce)
    parts.strategy.warm_up(parts.loader)
    before = [weight.detach().cpu().numpy().copy() for weight in parts.strategy.weights()]
    steps(parts, 12)
    assert re.fullmatch("(ssggg)+", "".join(calls))
    return [before, [weight.detach().cpu().numpy() for weight in parts.strategy.weights()]]


def assert_both_are_trained(weights_by_rank: list[list[list[Any]]]) -> None:
    (before, first), *others = weights_by_rank
    for _, weights in others:
        assert all((one == other).all() for one, other in zip(weights, first, strict=True))
    assert not [weight.shape for weight, old in zip(first, before, strict=True) if (weight == old).all()]


class WithNormAct(Branches):
    """A layer that can be synchronised."""

    def model(self) -> nn.Module:
        made = super().model()
        made.register_module("spare", NormAct(4))
        return made


def _waits_for_backward(world: World, sync_batch_norm: bool) -> bool:
    made: list[AfterBackward] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "AfterBackward", lambda *parts: made.append(AfterBackward(*parts)) or made[-1])
        build(world, {"num_train": 64}, task_class=WithNormAct, strategy="ddp", sync_batch_norm=sync_batch_norm)
    return bool(made)


def test_gradients_wait_for_backward_only_where_statistics_are_summed(run_ranks: Ranks) -> None:
    assert [run_ranks(_waits_for_backward, 2, is_summed) for is_summed in (True, False)] == [[True] * 2, [False] * 2]


class NormedBranches(Branches):
    """Each branch has a batch norm of its own."""

    def model(self) -> nn.Module:
        made = Forked(8)
        made.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        return made


class UntrainedNorms(Branches):
    """Each branch is a batch norm without parameters: DDP cannot tell which one was used."""

    find_unused = False

    def model(self) -> nn.Module:
        made = Forked(8)
        made.branches = nn.ModuleList(nn.BatchNorm1d(8, affine=False) for _ in range(2))
        return made


def _different_norms(world: World, task_class: type[Tiny]) -> str:
    """Why workers are refused that are at different batch norms."""
    flags = {"sync_batch_norm": True, "strategy": "ddp", "global_batch_size": 16}
    parts = build(world, {"num_train": 64}, task_class=task_class, **flags)
    cast(Forked, parts.strategy.module).place = world.rank
    with pytest.raises(SettingError) as refused:
        parts.strategy.warm_up(parts.loader)
    return refused.value.why


class Sometimes(NormedBranches):
    """The common end has no batch norm, and the first branch no layer."""

    def model(self) -> nn.Module:
        made = cast(Forked, super().model())
        made.end = nn.Sequential(nn.Linear(8, 3))
        made.branches[0] = nn.Identity()
        return made

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        forked = cast(Forked, getattr(model, "module", model))
        forked.place = 1 - forked.place
        return super().loss(model, batch)


def no_batch_norm(world: World, accumulate: int) -> str:
    """Why workers are refused of which one comes to no batch norm in a micro-batch."""
    flags = {"sync_batch_norm": True, "strategy": "ddp", "global_batch_size": 16, "accumulate": accumulate}
    parts = build(world, {"num_train": 64}, task_class=Sometimes, **flags)
    cast(Forked, parts.strategy.module).place = world.rank
    with pytest.raises(SettingError) as refused:
        list(map(parts.strategy.micro_step, parts.loader.epoch(1)))
    return refused.value.why


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_worker_that_comes_to_no_batch_norm_is_refused(run_ranks: Ranks, accumulate: int) -> None:
    said = "rank 0 is at the batch norm branches.1.1 and rank 1 at the end of its micro-batch"
    assert run_ranks(no_batch_norm, 2, accumulate) == [said] * 2


@pytest.mark.parametrize(
    ("task_class", "names"),
    [(NormedBranches, ("branches.0.1", "branches.1.1")), (UntrainedNorms, ("branches.0", "branches.1"))],
)
def test_workers_at_different_batch_norms_are_refused(
    run_ranks: Ranks, task_class: type[Tiny], names: tuple[str, str]
) -> None:
    said = f"rank 0 is at the batch norm {names[0]} and rank 1 at the batch norm {names[1]}"
    assert run_ranks(_different_norms, 2, task_class) == [said] * 2


class InTurns(Branches):
    """Each micro-batch takes the other branch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        forked = cast(Forked, getattr(model, "module", model))
        forked.place = 1 - forked.place
        return super().loss(model, batch)


def _trained_in_turns(world: World) -> list[bool]:
    parts = build(world, {"num_train": 64}, task_class=InTurns, global_batch_size=16, accumulate=2, strategy="ddp")
    parts.strategy.warm_up(parts.loader)
    before = [weight.detach().clone() for weight in parts.strategy.weights()]
    steps(parts, 3)
    return [bool((weight != old).any()) for weight, old in zip(parts.strategy.weights(), before, strict=True)]


def test_a_parameter_may_be_used_in_any_micro_batch_of_a_step(run_ranks: Ranks) -> None:
    for has_changed in run_ranks(_trained_in_turns, 2):
        assert all(has_changed)


def test_workers_that_use_different_parameters_exchange_gradients_and_statistics(run_ranks: Ranks) -> None:
    assert_both_are_trained(run_ranks(trained_branches, 2))


class Scaled(nn.Module):
    """Its weight's gradient has other strides than the weight, along a side of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * self.weight.t()
        return scaled


class ScaledTask(Tiny):
    def model(self) -> nn.Module:
        return nn.Sequential(Scaled(), nn.Linear(8, 3))


def _gradients_and_buckets(world: World) -> tuple[bool, int, int]:
    """Whether gradients have the strides of their parameters, and how many memories there are for how many of them."""
    parts = build(world, {"num_train": 64, "norm": False}, task_class=ScaledTask, global_batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as DDP would warn of strides
        steps(parts, 2)
        parts.strategy.micro_step(next(iter(parts.loader.epoch(2))))
    parameters = [one for one in parts.strategy.module.parameters() if one.grad is not None]
    gradients = [one.grad for one in parameters if one.grad is not None]
    is_alike = all(one.stride() == made.stride() for one, made in zip(parameters, gradients, strict=True))
    return is_alike, len({made.untyped_storage().data_ptr() for made in gradients}), len(gradients)


def test_gradients_are_parts_of_a_bucket_and_have_the_strides_of_their_weights(run_ranks: Ranks) -> None:
    assert run_ranks(_gradients_and_buckets, 2) == [(True, 1, 3)] * 2
