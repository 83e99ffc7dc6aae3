"""Workers that may be ahead of one another: signals, checkpoints and rollbacks while their votes are read late."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stormo.distributed.world import World
from stormo.telemetry.record import DivergenceNoticed
from stormo.training.loop import Outcome, train
from tests.tiny_run import arrays, assert_same_bits, whole_state
from tests.training.test_divergence import Recovering, assemble
from tests.training.test_loop import Run, prepare

Ranks = Callable[..., list[Any]]
# Ten steps an epoch, in which no vote is read in time, and a validation of one round, in which none is cast.
SLOW: dict[str, Any] = {"epochs": 3, "validation_batch_size": 30, "checkpoint_every": "0"}
LOCAL: dict[str, Any] = {"strategy": "local", "average_every": "2ep"}
SERVER: dict[str, Any] = {"strategy": "server", "staleness": 12}


def _stopped(world: World, flags: dict[str, Any], at_step: int) -> tuple[Outcome, Any, Outcome, Any]:
    """A run that one worker alone is asked to stop, and that then continues: how both ended, its save and its state."""

    def on_step(run: Run, step: int) -> None:
        if world.rank == world.size - 1 and step == at_step and not run.saves:
            run.flag.signal_number = signal.SIGUSR1

    run = prepare({"num_train": 160}, world=world, on_step=on_step, **(SLOW | flags))
    outcome, save = train(run.training), run.saves[-1]
    run.flag.signal_number = 0
    return outcome, save, train(run.training), whole_state(run.parts)


@pytest.mark.parametrize(
    ("size", "flags", "at_step", "heard_at"),
    [
        (2, LOCAL, 1, 5),  # three steps late
        (2, LOCAL, 8, 10),  # at the end of the epoch
        (2, LOCAL, 10, 14),  # when the last vote of the epoch was cast already
        (2, LOCAL | {"checkpoint_every": "4"}, 1, 4),  # before a checkpoint
        (2, LOCAL | {"average_every": "3"}, 1, 4),  # two steps late
        (1, LOCAL, 1, 2),
        (3, SERVER, 1, 10),
        (2, SERVER | {"checkpoint_every": "4", "servers": 2}, 1, 4),
    ],
)
def test_a_signal_is_noticed_although_no_vote_is_read_in_time(
    run_ranks: Ranks, size: int, flags: dict[str, Any], at_step: int, heard_at: int
) -> None:
    results = run_ranks(_stopped, size, flags, at_step)
    whole = run_ranks(_stopped, size, flags, 99)
    epoch, position = divmod(heard_at - 1, 10)
    for (outcome, save, end, state), (whole_outcome, _, _, whole_end) in zip(results, whole, strict=True):
        assert (outcome, end, whole_outcome) == (
            Outcome("signal", signal.SIGUSR1),
            Outcome("epochs"),
            Outcome("epochs"),
        )
        assert save == (heard_at, epoch + 1, 16 * (position + 1), None)
        if flags["strategy"] == "local":
            assert_same_bits(state, whole_end)


def _rolled_back(world: World, folder: str) -> tuple[Any, ...]:
    flags: dict[str, Any] = {"num_train": 200, "checkpoint_every": "4", "bad_step": 6, "base_lr": 0.1}
    flags |= {"strategy": "server", "staleness": 3, "on_divergence": "rollback", "run_name": "rolled"}
    parts, training, (recorder, _, records) = assemble(world, folder, Recovering, **flags)
    assert train(training) == Outcome("epochs")
    recorder.end("epochs")
    parts.loader.close()
    noticed = [(one.kind, one.rolled_back_to_step) for one in records if isinstance(one, DivergenceNoticed)]
    threads = [thread.name for thread in threading.enumerate() if "server" in thread.name]
    ages = parts.strategy.stale_gradients
    return arrays(parts.strategy.module.named_parameters()), parts.state.progress.step, ages, noticed, threads


def test_stale_servers_roll_back_to_a_good_checkpoint_and_on(run_ranks: Ranks, tmp_path: Path) -> None:
    results = run_ranks(_rolled_back, 2, str(tmp_path))
    for weights, step, _, _, threads in results:
        assert_same_bits(weights, results[0][0])
        assert all(np.isfinite(value).all() for value in weights.values())
        assert (step, threads) == (3 * math.ceil(200 / 16), [])
    _, _, ages, noticed, _ = results[0]
    # Every gradient of the run as it is now: those of the lost steps are not counted.
    assert sum(ages.values()) == 2 * 39
    assert noticed == [("loss", 4)]
