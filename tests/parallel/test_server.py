"""Parameter servers: synchronous ones against ddp, and of stale ones everything that they promise."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.cli import main
from stormo.config.plan.parallelism import max_staleness
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.parallel.server import Server
from stormo.parallel.server_transport import AsyncServer, ServerMessage, assign
from stormo.tasks.task import Task
from stormo.telemetry.record import EpochDone
from stormo.training.loop import Outcome, train
from tests.commands.test_train import in_ranks
from tests.ranks import RankFailedError
from tests.tiny_run import arrays, build, steps
from tests.tiny_task import Tiny
from tests.training.test_loop import Run, prepare

Ranks = Callable[..., list[Any]]
EXACT = {"precision": "fp64", "global_batch_size": 16, "weight_decay": 0.01}
K = 2


# --- synchronous ------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A frozen layer, a single number, and a layer that is for shares of more than five samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.last = nn.Linear(16, 3)
        self.more = nn.Linear(3, 3)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.scale * self.first(x).relu())
        return x + self.more(x) if len(x) > 5 else x


class Branched(Tiny):
    """Of three workers one uses a layer in a full batch, and none in the short last one; they begin apart."""

    find_unused = True

    def model(self) -> nn.Module:
        model = Branches()
        nn.init.constant_(model.more.bias, dist.get_rank())
        return model


class Oddities(nn.Module):
    """A weight in channels-last, one used twice, one turned, complex numbers, and buffers of types and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.register_buffer("seen", torch.full((2,), dist.get_rank()))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 2, 2, 2)).flatten(1)
        x = self.again(self.first(x).relu()) * self.phases.abs().to(x.dtype)
        assert not bool(self.seen.any())  # type: ignore[operator] # they begin as the main worker's
        return self.last(x) + x @ self.turned  # type: ignore[no-any-return]


class Odd(Tiny):
    """What a model may have besides plain weights."""

    def model(self) -> nn.Module:
        return Oddities()


def _trained(world: World, task: type[Task], flags: dict[str, Any]) -> dict[str, Any]:
    # Batches of 16, 16 and 5 samples, which three workers cannot share evenly.
    parts = build(world, {"num_train": 37, "norm": False}, task_class=task, **flags)
    losses = steps(parts, 7)
    return {"losses": np.array(losses), **arrays(parts.strategy.module.named_parameters())}


def _differences(world: World, task: type[Task], flags: dict[str, Any]) -> list[float]:
    """How far one and two servers are from ddp."""
    expected = _trained(world, task, flags | {"strategy": "ddp"})
    assert len(set(expected["losses"])) == 7
    found = []
    for servers in (1, 2):
        ours = _trained(world, task, flags | {"strategy": "server", "servers": servers})
        assert ours.keys() == expected.keys()
        found.append(max(float(np.abs(ours[name] - value).max()) for name, value in expected.items()))
    return found


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        (Tiny, {"optimizer": "sgd", "clip_norm": 0.05, "gradient_noise": 0.01}),
        (Tiny, {"optimizer": "adamw", "accumulate": 2}),
        (Tiny, {"optimizer": "lars"}),
        (Branched, {"optimizer": "sgd"}),
        (Odd, {"optimizer": "sgd", "channels_last": True, "clip_norm": 1.0}),
    ],
    ids=["sgd", "adamw", "lars", "unused", "odd"],
)
def test_synchronous_servers_train_as_ddp(run_ranks: Ranks, task: type[Task], flags: dict[str, Any]) -> None:
    for differences in run_ranks(_differences, 3, task, EXACT | flags):
        assert max(differences) < 1e-12


def test_a_step_of_two_workers_is_that_of_ddp_to_the_last_bit(run_ranks: Ranks) -> None:
    assert run_ranks(_differences, 2, Tiny, {"optimizer": "adamw", "global_batch_size": 16}) == [[0.0, 0.0]] * 2


# --- stale ------------------------------------------------------------------------------------------------------------


def _run_apart(world: World, servers: int) -> dict[str, Any]:
    """Two epochs of ten steps; the last worker stands still in its first one until the main one is far ahead."""
    saved: list[bytes] = []
    applied: list[int] = []  # whose gradients this server has stepped with

    class Waiting(Tiny):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            loss = super().loss(model, batch)
            if world.rank == world.size - 1 and self.num_calls == 1:
                assert world.store_get(["far ahead"], 60) == [True]
            return loss

    def on_step(run: Run, step: int) -> None:
        if world.is_main and step == K + 1:
            world.store_put("far ahead", True)

    def on_save(run: Run) -> None:
        strategy = run.parts.strategy
        saved.append(b"".join(weight.detach().numpy().tobytes() for weight in strategy.weights()))
        for part in strategy.shards():  # which a checkpoint holds
            assert torch.equal(part.local, strategy.module.get_parameter(part.name))

    flags: dict[str, Any] = {"strategy": "server", "servers": servers, "staleness": K, "checkpoint_every": "4"}
    run = prepare({"num_train": 160}, task_class=Waiting, world=world, on_step=on_step, on_save=on_save, **flags)
    strategy = run.parts.strategy
    assert isinstance(strategy, Server)
    server = strategy._server
    if isinstance(server, AsyncServer):
        step_with = server._step_with

        def noted(rank: int, message: ServerMessage) -> None:
            applied.append(rank)
            step_with(rank, message)

        server._step_with = noted  # type: ignore[method-assign]
    return {
        "outcome": train(run.training),
        "saved": saved,
        "applied": applied,
        "ages": strategy.stale_gradients,
        "most": max_staleness(run.parts.config, run.parts.plan.layout),
        "losses": [done.train_loss for done in run.of(EpochDone)],
        "threads": [thread.name for thread in threading.enumerate() if "server" in thread.name],
    }


@pytest.mark.parametrize("servers", [1, 2])
def test_stale_servers_apply_every_gradient_once_within_their_bound(run_ranks: Ranks, servers: int) -> None:
    results = run_ranks(_run_apart, 3, servers)
    for rank, result in enumerate(results):
        assert result["outcome"] == Outcome("epochs")
        assert result["threads"] == []
        assert len(result["saved"]) == 6  # steps 4, 8, 12, 16, and the ends of both epochs
        assert result["saved"] == results[0]["saved"]  # the same weights on all workers
        assert result["losses"][1] < result["losses"][0]
        if rank < servers:
            assert Counter(result["applied"]) == {0: 20, 1: 20, 2: 20}
            counts, furthest = [0, 0, 0], 0
            for worker in result["applied"]:
                counts[worker] += 1
                furthest = max(furthest, max(counts) - min(counts))
            assert furthest == K + 1  # it has sent what it has computed when it was K ahead
    ages = results[0]["ages"]
    assert sum(ages.values()) == 3 * 20 * servers
    assert 0 < max(ages) <= results[0]["most"] == (2 * K + 2) * 2


def _breaks(world: World, is_other_gone: bool) -> None:
    failed = threading.Event()

    def on_step(run: Run, step: int) -> None:
        if world.is_main:
            assert failed.wait(60)
            if is_other_gone:
                raise PeerFailedError("what a worker says when another one has gone")

    run = prepare({"num_train": 160}, world=world, on_step=on_step, strategy="server", staleness=K)
    strategy = run.parts.strategy
    assert isinstance(strategy, Server)
    server, wait = strategy._server, strategy._transport.wait
    if isinstance(server, AsyncServer):

        def fails(rank: int, message: ServerMessage) -> None:
            if rank:
                raise ValueError("a step that fails on purpose")

        def waits(works: Sequence[dist.Work]) -> None:
            wait(works)
            if threading.current_thread() is not threading.main_thread():
                failed.set()  # and the other worker was told so

        server._step_with = fails  # type: ignore[method-assign]
        strategy._transport.wait = waits  # type: ignore[method-assign]
    train(run.training)


@pytest.mark.parametrize("is_other_gone", [False, True])
def test_an_error_in_the_thread_of_a_server_ends_the_run(run_ranks: Ranks, is_other_gone: bool) -> None:
    with pytest.raises(RankFailedError) as raised:
        run_ranks(_breaks, 2, is_other_gone)
    main, other = str(raised.value).split("Traceback")[1:]
    assert main.rstrip().endswith("ValueError: a step that fails on purpose")
    assert "PeerFailedError: rank 0 failed as a server while rank 1 waited for it." in other


@pytest.mark.parametrize("staleness", ["0", "2"])
def test_a_failed_worker_is_named_and_servers_do_not_wait_for_it(tmp_path: Path, staleness: str) -> None:
    flags = ("--strategy", "server", "--staleness", staleness)
    done = in_ranks(tmp_path, *flags, TINY_FAULT="raise 1 7")
    assert done.returncode == 1
    assert "rank 1 on host" in done.stderr.splitlines()[0]
    assert "ValueError: the tiny task fails on purpose" in done.stderr


def test_one_worker_resumes_a_run_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_ranks(tmp_path, "--strategy", "server", "--servers", "2", "--epochs", "1", "--run-name", "kept")
    assert done.returncode == 0, done.stderr
    shutil.copytree("runs/kept", "runs/changed")
    capsys.readouterr()
    again = ["train", "--device", "cpu", "--num-gpus", "1", "--epochs", "2", "--resume"]
    assert main([*again, "kept"]) == 0
    assert "single: resumed on one worker, which needs no server" in capsys.readouterr().out
    assert main([*again, "changed", "--strategy", "single"]) == 0
    found = [json.loads(Path("runs", name, "summary.json").read_text()) for name in ("kept", "changed")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert (found[0]["steps"], found[0]["num_resumes"], found[0]["world_size"]) == (found[1]["steps"], 1, 1)
    assert 'strategy = "server"' in Path("runs/kept/config.toml").read_text()  # for when there are several again
    assert main([*again, "kept", "--epochs", "3", "--staleness", "1"]) == 2
    assert "it needs several workers and there is one" in capsys.readouterr().err


# --- parts ------------------------------------------------------------------------------------------------------------


def test_tensors_are_assigned_evenly_by_their_bytes() -> None:
    sizes = [100, 3, 50, 50, 7, 90]
    dealt = assign(sizes, 2)
    assert sorted(dealt[0] + dealt[1]) == list(range(6))
    assert [sum(sizes[number] for number in numbers) for numbers in dealt] == [150, 150]
    assert all(assign([0, 0, 0], 3))


def test_a_message_has_tensors_of_any_dtype_and_flags() -> None:
    tensors = [torch.randn(3, 5), torch.randn((), dtype=torch.float64), torch.randn(7).bfloat16(), torch.randn(0, 2)]
    sent, got = ServerMessage(tensors), ServerMessage(tensors)
    sent.pack([*tensors[:2], None, tensors[3]], 0.25)
    got.take(sent)
    assert (got.learning_rate, got.status) == (0.25, 0)
    for value, expected in zip(got.present(), [*tensors[:2], None, tensors[3]], strict=True):
        assert value is expected is None or torch.equal(value, expected)  # type: ignore[arg-type]
    sent.pack(tensors)
    got.add(sent)
    assert torch.equal(got.values[0], 2 * tensors[0])
    assert torch.equal(got.present()[2], tensors[2])  # type: ignore[arg-type]


class OneLayer(Tiny):
    """Two tensors."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 3)


def _refused(world: World) -> str:
    with pytest.raises(SettingError) as raised:
        build(world, task_class=OneLayer, strategy="server", servers=3)
    return str(raised.value)


def test_more_servers_than_tensors_are_refused(run_ranks: Ranks) -> None:
    for text in run_ranks(_refused, 3):
        assert text == (
            "--servers 3 was set, but the model has 2 tensors to train, and each is stored whole by one server; "
            "set --servers 2 or fewer."
        )
