"""A step as a CUDA graph: the same training as without, whatever comes between; refused where it would not be."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.schema import TrainConfig, option
from stormo.data import TensorData
from stormo.data.loaders import ResidentLoader, Share
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel import cuda_graph as graph_module
from stormo.parallel.cuda_graph import CaptureRefusedError, MicroBatchGraph, batch_obstacle, host_state
from stormo.parallel.pytree import tree_flatten
from stormo.parallel.table import strategy_class
from stormo.system.hardware import Gpu, visible_gpus
from stormo.tasks.task import Task
from stormo.tasks.wide_resnet import WideResNet
from stormo.training.state import Progress, RunState
from tests import tiny_run
from tests.tiny_run import Parts, assert_same_bits, whole_state

Ranks = Callable[..., list[Any]]
H200 = Gpu(name="NVIDIA H200", memory_bytes=141 * 2**30, capability=(9, 0))
FACTS = Facts(num_train=1000, num_validation=100, train_bytes=2**20)


# --- the plan ---------------------------------------------------------------------------------------------------------


def _plan(num_gpus: int, facts: Facts = FACTS, **flags: Any) -> Plan:
    config: TrainConfig = options.make_config(flags, None)
    return resolve(config, resolve_layout(config, [H200] * num_gpus), facts)


@pytest.mark.parametrize(
    ("num_gpus", "flags", "is_on"),
    [
        (1, {}, True),
        (1, {"batch_size": 1000}, True),
        (1, {"batch_size": 1001}, False),  # there is no full batch
        (1, {"graph": False}, False),
        (0, {}, False),
        (4, {}, True),
        (1, {"strategy": "ddp"}, True),
        (4, {"backend": "gloo"}, False),
        (4, {"compress": "bf16"}, False),
        (4, {"strategy": "zero2"}, False),
        (2, {"strategy": "dp"}, False),
        (1, {"accumulate": 3}, False),
        (1, {"compile": True}, False),
    ],
)
def test_the_plan_decides_whether_a_step_is_replayed(num_gpus: int, flags: dict[str, Any], is_on: bool) -> None:
    plan = _plan(num_gpus, **flags)
    assert plan.graph is is_on
    assert dict(plan.explanation)["graph"].startswith("on" if is_on else "off")
    if "graph" in flags or "batch_size" in flags or is_on:
        return
    with pytest.raises(SettingError, match="--graph was set"):
        _plan(num_gpus, graph=True, **flags)


def test_a_step_of_fsdp_is_replayed_only_where_that_is_asked_for() -> None:
    plan = _plan(4, strategy="fsdp")
    assert not plan.graph
    assert "where --graph asks for it" in dict(plan.explanation)["graph"]
    assert _plan(4, strategy="fsdp", graph=True).graph


def test_steps_of_several_workers_are_replayed_where_all_batches_have_one_shape() -> None:
    facts = replace(FACTS, train_bytes=None)  # a Dataset
    assert _plan(1, facts).graph
    plan = _plan(4, facts)
    assert not plan.graph
    assert "may differ in shape" in dict(plan.explanation)["graph"]
    assert _plan(4, facts, graph=True).graph


# --- what is refused, without a device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((3, torch.zeros(2)), "a batch holds a value of type int, which a replay would freeze"),
        ({"x": torch.zeros(2)}, "a batch holds a tensor on the cpu"),
        ((), "a batch holds no tensor"),
    ],
)
def test_a_batch_that_a_replay_would_freeze_is_refused(data: Any, words: str) -> None:
    assert batch_obstacle(data) == words


class _Owner:
    def __init__(self) -> None:
        self.count, self.rate, self.history = 0, float("nan"), [1]
        self.layer = nn.Linear(1, 1)


def _draw_torch(owner: _Owner) -> None:
    torch.rand(1)


def _draw_python(owner: _Owner) -> None:
    random.random()


def _draw_numpy(owner: _Owner) -> None:
    np.random.rand()


def _count(owner: _Owner) -> None:
    owner.count += 1


def _remember(owner: _Owner) -> None:
    owner.history.append(2)


@pytest.fixture
def sync_debug_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stands for torch's, which needs a device; its last value is the mode in force."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    yield modes
    assert modes[-1] == 0


def test_a_pass_that_waits_for_the_device_runs_to_its_end_and_is_refused(sync_debug_mode: list[int]) -> None:
    ended = []

    def run_pass(data: Any) -> Tensor:
        assert sync_debug_mode[-1] == 1
        for text in ("something else", *["called a synchronizing CUDA operation (Triggered internally at …)"] * 2):
            warnings.warn(text, stacklevel=1)
        ended.append(data)  # a rank that raised would leave its peers in a collective
        return torch.zeros(())

    with (
        pytest.warns(UserWarning, match="something else"),
        pytest.raises(
            CaptureRefusedError, match=r"^a micro-batch waits for the device \(test_cuda_graph.py, line \d+\)$"
        ),
    ):
        graph_module._check_host(run_pass, "batch", {"task": _Owner()})
    assert ended == ["batch"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_draw_torch, "torch's CPU generator"),
        (_draw_python, "Python's generator"),
        (_draw_numpy, "NumPy's generator"),
        (_count, "task.count"),
        (_remember, "task.history"),
    ],
)
@pytest.mark.usefixtures("sync_debug_mode")
def test_a_pass_that_changes_the_host_is_refused(change: Callable[[_Owner], None], name: str) -> None:
    owner = _Owner()

    def run_pass(data: Any) -> Tensor:
        change(owner)
        return torch.zeros(())

    with pytest.raises(CaptureRefusedError, match=f"a micro-batch changes {name} on the host"):
        graph_module._check_host(run_pass, None, {"task": owner})


@pytest.mark.usefixtures("sync_debug_mode")
def test_a_loss_on_the_host_is_refused_and_a_pass_without_traces_is_not() -> None:
    with pytest.raises(CaptureRefusedError, match="the loss is a tensor on the cpu"):
        graph_module._check_host(lambda data: torch.zeros(()), None, {"task": _Owner()})
    loss: Any = SimpleNamespace(device=torch.device("cuda"))
    graph_module._check_host(lambda data: loss, None, {"task": _Owner()})


def test_the_layers_of_a_model_are_watched_too() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    before = host_state({"model": model})
    model[1].p = 0.25  # type: ignore[assignment]
    after = host_state({"model": model})
    assert [name for name in before if before[name] != after[name]] == ["model.1.p"]


def test_a_reason_names_the_users_line_and_not_torchs() -> None:
    try:
        torch.zeros(2).view(3)
    except RuntimeError as error:
        reason = graph_module._reason(error)
    assert re.fullmatch(r"RuntimeError \(test_cuda_graph\.py, line \d+\): shape '\[3\]' is invalid.*", reason)


class _FakeGraph:
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_a_replay_takes_batches_of_its_shape_alone() -> None:
    parameter, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    gradient = parameter.grad = torch.ones(2)
    inputs, structure = tree_flatten({"x": torch.zeros(3), "y": torch.zeros(3)})
    fake, loss = _FakeGraph(), torch.tensor(5.0)
    captured = MicroBatchGraph(fake, inputs, structure, loss, [parameter, unused])  # type: ignore[arg-type]
    x, y = torch.ones(3), torch.full((3,), 2.0)
    for other in (
        {"y": y, "x": x},  # in another order, it would be mistaken
        {"x": x},
        {"x": x, "y": y[:2]},
        {"x": x, "y": y.double()},
        {"x": x, "y": 2.0},
        (x, y),
    ):
        assert captured.replay(other) is None
    assert fake.num_replays == 0
    assert not any(tensor.any() for tensor in inputs)

    parameter.grad = None
    answer = captured.replay({"x": x, "y": y})
    assert fake.num_replays == 1
    assert parameter.grad is gradient
    assert unused.grad is None
    assert torch.equal(inputs[0], x)
    assert torch.equal(inputs[1], y)
    loss.zero_()  # as the next replay would
    assert answer is not None
    assert answer.item() == 5.0


def _fall_back(world: World) -> None:
    parts = tiny_run.build(world)
    parts.strategy._plan = replace(parts.plan, graph=True)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy._graph is None
    assert parts.strategy.notices == [
        "Steps are run by Python, not replayed as a CUDA graph: a batch holds a tensor on the cpu."
    ]
    assert parts.strategy.warnings == []
    asked = tiny_run.build(world)
    asked.strategy._plan = replace(asked.plan, graph=True)
    asked.strategy._settings = replace(asked.config, speed=replace(asked.config.speed, graph=True))
    asked.strategy.warm_up(asked.loader)
    assert asked.strategy.warnings == parts.strategy.notices  # it was asked for, and is not done
    fallen = tiny_run.steps(parts, 40)
    parts = tiny_run.build(world)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy.notices == []
    assert fallen == tiny_run.steps(parts, 40)


def test_a_task_that_is_refused_trains_as_ever_and_says_so_once(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_fall_back, 1)


# --- on a device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImagesOptions:
    """Options of the images task."""

    num_train: int = option(100, "training samples")
    dropout: float = option(0.0, "dropout")


class Images(Task):
    """Random images of four classes for the real network, a fifth as wide."""

    name = "images"
    Options: ClassVar[type[Any]] = ImagesOptions

    def model(self) -> nn.Module:
        return WideResNet(width=2, dropout=self.options.dropout, num_classes=4)

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(4, (self.options.num_train,), generator=generator)
        images = torch.rand(self.options.num_train, 1, 28, 28, generator=generator)
        return TensorData(images + 0.2 * labels.view(-1, 1, 1, 1), labels)

    def validation_data(self) -> TensorData:
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images).float(), labels)


class WithItem(Images):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        assert loss.item() >= 0.0
        return loss


class WithHiddenWait(Images):
    """Waits in a way that torch's check does not see, so that the capture itself fails."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        torch.cuda.synchronize()
        return loss


class WithError(Images):
    """Fails while it is captured."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not now")
        return loss


class WithHostRandomness(Images):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * float(torch.rand(1))


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build_on_gpu(task_class: type[Task] = Images, task_options: dict[str, Any] | None = None, **flags: Any) -> Parts:
    flags = {"warmup_epochs": 0.0, "base_lr": 0.02, "batch_size": 16, **flags}
    config = options.make_config(flags, None)
    task = task_class(ImagesOptions(**(task_options or {})))
    plan = resolve(config, resolve_layout(config, visible_gpus()[:1]), task.facts())
    world = World(alone(), torch.device("cuda", 0))
    torch.manual_seed(1)
    strategy = strategy_class(plan.layout)(world, plan, task, config)
    torch.manual_seed(2)
    share = Share(global_batch_size=plan.global_batch_size, accumulate=plan.accumulate, worker=0, num_workers=1)
    data = task.train_data()
    assert isinstance(data, TensorData)
    loss_sum = torch.zeros((), dtype=torch.float64, device="cuda")
    return Parts(
        world=world,
        config=config,
        plan=plan,
        task=task,
        strategy=strategy,
        loader=ResidentLoader(data, share, 0, 0, task.augment, world.device),
        state=RunState(progress=Progress(), strategy=strategy, loss_sum=loss_sum),
    )


def _steps(parts: Parts, num_steps: int) -> list[float]:
    progress, losses = parts.state.progress, list[float]()
    while True:
        for batch in parts.loader.epoch(progress.epoch, progress.position):
            if len(losses) == num_steps:
                return losses
            loss = parts.strategy.micro_step(batch)
            parts.state.loss_sum += loss * batch.span.step_samples
            parts.strategy.step(parts.plan.learning_rate)
            progress.advance(parts.loader.samples(batch.span))
            losses.append(float(loss))
        progress.epoch, progress.position = progress.epoch + 1, 0


def _state(parts: Parts) -> dict[str, Any]:
    return whole_state(parts) | {"cuda_rng": torch.cuda.get_rng_state().numpy().copy()}


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "bf16"},
        {"precision": "fp32", "clip_norm": 0.5, "ema": 0.9},
        {"precision": "fp16", "optimizer": "adamw"},
        {"precision": "fp16", "clip_norm": 0.5},
        {"precision": "bf16", "channels_last": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_replayed_training_is_the_eager_one_to_the_last_bit(flags: dict[str, Any], dropout: float) -> None:
    states, losses = [], []
    for is_graph in (True, False):
        parts = build_on_gpu(task_options={"dropout": dropout}, graph=is_graph, **flags)
        parts.strategy.warm_up(parts.loader)
        assert (parts.strategy._graph is not None) is is_graph
        assert parts.strategy.notices == []
        losses.append(_steps(parts, 20))  # 100 samples: six batches of 16 and one of 4
        states.append(_state(parts))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 20
    assert_same_bits(*states)


class CountedImages(Images):
    """The mean over the images of some classes, with their number; it is 0/0 where there are none."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        mask = labels == 3
        each = cross_entropy(model(images).float(), labels, reduction="none")
        return (each * mask).sum() / mask.sum(), mask.sum()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_with_counts_are_replayed_as_they_are_computed_without_waiting(precision: str) -> None:
    states = []
    for is_graph in (True, False):
        parts = build_on_gpu(CountedImages, graph=is_graph, precision=precision)
        parts.strategy.warm_up(parts.loader)
        assert (parts.strategy._graph is not None) is is_graph
        _steps(parts, 20)
        states.append(_state(parts))
        batch = next(parts.loader.epoch(1))
        if precision == "bf16":  # the loss scale is read on the host
            torch.cuda.set_sync_debug_mode(2)
            try:
                part = parts.strategy.micro_step(batch)
                parts.strategy.step(0.0)
                parts.state.add_loss(part, batch.span.step_samples)
            finally:
                torch.cuda.set_sync_debug_mode(0)
    assert_same_bits(*states)


def _without_a_replay(world: World) -> str:
    parts = tiny_run.build(world, {"num_train": 64}, global_batch_size=16, strategy="ddp")
    parts.strategy._graph = cast(Any, SimpleNamespace(replay=lambda data: None))  # a batch of another shape
    with pytest.raises(SettingError) as refused:
        parts.strategy.micro_step(next(parts.loader.epoch(1)))
    return str(refused.value)


def test_a_worker_that_cannot_replay_does_not_leave_the_others_in_their_replays(run_ranks: Ranks) -> None:
    for rank, said in enumerate(run_ranks(_without_a_replay, 2)):
        assert f"the batch of rank {rank} has another shape than the captured one" in said
        assert "set --no-graph" in said


@pytest.mark.gpu
def test_full_batches_are_replayed_and_the_short_one_is_not() -> None:
    parts = build_on_gpu()
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy._graph is not None
    replays: list[int] = []
    replay = parts.strategy._graph.replay
    parts.strategy._graph.replay = lambda data: replays.append(len(data[0])) or replay(data)  # type: ignore[method-assign, func-returns-value]
    _steps(parts, 14)
    assert replays == [16] * 12


@pytest.mark.gpu
def test_every_replay_drops_others_and_the_generator_decides_which() -> None:
    parts = build_on_gpu(task_options={"dropout": 0.5}, momentum=0.0)
    parts.strategy.warm_up(parts.loader)
    (batch, _) = parts.loader.first_and_last()

    def gradients() -> list[Tensor]:
        parts.strategy.micro_step(batch)
        return [p.grad.clone() for p in parts.strategy.module.parameters() if p.grad is not None]

    state = torch.cuda.get_rng_state()
    first, second = gradients(), gradients()
    torch.cuda.set_rng_state(state)
    again = gradients()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a.ndim > 1)
    # To rounding, as this run is not asked to be deterministic.
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_noise_and_its_scale_never_wait_for_the_device() -> None:
    flags: dict[str, Any] = {"accumulate": 2, "gradient_noise_batch": 8, "gradient_noise": 0.01, "clip_norm": 1.0}
    parts = build_on_gpu(precision="bf16", **flags)
    strategy = parts.strategy
    strategy.warm_up(parts.loader)
    assert strategy.noise_scale is not None
    batches = list(parts.loader.epoch(1))
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches * 6:  # several blocks of measured steps
            strategy.micro_step(batch)
            if batch.span.is_last:
                strategy.step(parts.plan.learning_rate)
                parts.state.progress.step += 1
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert strategy.noise_scale.collect_moments()[0] > 8
    # A copy from memory that is not pinned would wait too, of which that mode says nothing.
    assert strategy._noise._drawn is not None
    assert strategy._noise._drawn[1].is_pinned()


@pytest.mark.gpu
def test_capture_leaves_no_trace() -> None:
    parts = build_on_gpu(task_options={"dropout": 0.2}, precision="fp16")
    parts.strategy.module.eval()  # as pretrained models come; a captured pass must not stay so
    before = _state(parts)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy._graph is not None
    assert parts.strategy.module.training
    assert_same_bits(_state(parts), before)
    assert all(parameter.grad is None for parameter in parts.strategy.module.parameters())
    _steps(parts, 3)
    before = _state(parts)
    parts.strategy.warm_up(parts.loader)
    assert_same_bits(_state(parts), before)
    assert int(parts.strategy.module.get_buffer("stem_norm.num_batches_tracked")) == 3


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("is_restored_first", [True, False], ids=["restore, capture", "capture, restore"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(is_restored_first: bool, precision: str) -> None:
    parts = build_on_gpu(task_options={"dropout": 0.2}, precision=precision)
    parts.strategy.warm_up(parts.loader)
    _steps(parts, 9)
    snapshot = copy.deepcopy(parts.state.snapshot(parts.world, 0))  # it refers to what training goes on with
    losses, expected = _steps(parts, 12), _state(parts)

    parts = build_on_gpu(task_options={"dropout": 0.2}, precision=precision)
    if not is_restored_first:
        parts.strategy.warm_up(parts.loader)
    parts.state.restore_snapshot(parts.world, snapshot, 0)
    if is_restored_first:
        parts.strategy.warm_up(parts.loader)
    assert parts.strategy._graph is not None
    assert _steps(parts, 12) == losses
    assert_same_bits(_state(parts), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("task_class", "words"),
    [
        (WithItem, r"a micro-batch waits for the device \(test_cuda_graph\.py, line \d+\)\."),
        (WithHiddenWait, r"\w*Error \(test_cuda_graph\.py, line \d+\): .*"),
        (WithError, r"ValueError \(test_cuda_graph\.py, line \d+\): not now\."),
        (WithHostRandomness, r"a micro-batch changes torch's CPU generator on the host, which a replay would not\."),
    ],
)
def test_a_task_that_cannot_be_captured_trains_eagerly_and_the_process_is_unharmed(
    task_class: type[Task], words: str
) -> None:
    parts = build_on_gpu(task_class, {"dropout": 0.2})
    before = _state(parts)
    parts.strategy.warm_up(parts.loader)
    assert parts.strategy._graph is None
    (notice,) = parts.strategy.notices
    assert re.fullmatch("Steps are run by Python, not replayed as a CUDA graph: " + words, notice), notice
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_bits(_state(parts), before)
    fallen = _steps(parts, 9)
    plain = build_on_gpu(task_class, {"dropout": 0.2}, graph=False)
    plain.strategy.warm_up(plain.loader)
    assert fallen == _steps(plain, 9)
    # Later captures work, and memory that another stream has used comes back.
    other = build_on_gpu()
    other.strategy.warm_up(other.loader)
    assert other.strategy._graph is not None
    _steps(other, 3)
    _assert_memory_of_other_streams_is_reused()


def _assert_memory_of_other_streams_is_reused() -> None:
    torch.cuda.synchronize()
    side, allocated = torch.cuda.Stream(), torch.cuda.memory_allocated()
    for _ in range(3):
        tensor = torch.zeros(2**20, device="cuda")
        tensor.record_stream(side)
        del tensor
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")  # the allocator looks at its events now
    assert torch.cuda.memory_allocated() - allocated <= 2**22
