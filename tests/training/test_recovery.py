"""The real command with an absurd learning rate: it goes back, stops with a diagnosis, and recovers.

The rate is 0.25 in the first step and beyond all measure from the second on, whose weights give the third step a loss
that is huge, and the fourth one that is not a number. All factors are powers of two, so that a rate that was lowered by
one is the lower rate to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from stormo import checkpoint
from stormo.data.loaders import IterableLoader, Share
from stormo.telemetry.events import current_events, read_events
from tests.commands.test_train import checkpoints, here, in_ranks, summary

ABSURD = ["--base-lr", str(2.0**65), "--warmup-epochs", "1", "--warmup-from", str(2.0**-68), "--checkpoint-every", "1"]
ABSURD += ["--no-task.norm"]
ROLLBACK = ["--on-divergence", "rollback", "--rollback-factor"]


def test_two_workers_roll_back_together_and_stop_with_what_happened(tmp_path: Path) -> None:
    once = [*ROLLBACK, "0.5", "--max-rollbacks", "1"]  # half of an absurd rate
    done = in_ranks(tmp_path, *ABSURD, *once, "--run-name", "one")
    run = tmp_path / "runs" / "one"
    assert (done.returncode, done.stderr) == (65, "")
    back, end = [line for line in done.stdout.splitlines() if line.startswith("Diverged at step ")]
    assert back.startswith("Diverged at step 4 (epoch 1): the training loss became ")
    assert back.endswith("Going back to step 1 with the learning rate × 0.5 (rollback 1 of 1).")
    assert end == [line for line in done.stdout.splitlines() if not line.startswith("Energy: ")][-1]
    assert " 1 rollback did not help. Try --base-lr 1.84467e+19, --clip-norm 1. " in end
    command = "stormo train --resume one --base-lr 1.84467e+19"
    assert end.endswith(f"The last good checkpoint is that of step 1; resume from it with: {command}")
    ended = summary(run)
    assert (ended["stopped_by"], ended["diverged_at_step"], ended["num_rollbacks"]) == ("divergence", 4, 1)
    assert ended["samples_trained"] == ended["samples_seen"] + 4 * 128  # steps 2 to 5, in which step 4 was known
    good = [name for name in checkpoints(run) if name.startswith("step-")]
    assert good == ["step-00000000", "step-00000001"]  # that of step 2 is set aside: its weights gave the huge loss
    weights = checkpoint.load(run / "checkpoints" / good[1]).model
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_rollback_is_what_the_command_of_the_diagnosis_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("--run-name", "one", *ABSURD) == 65
    assert here("--resume", "one", "--base-lr", "0.125") == 0
    assert "Warning: one diverged at step 4; it resumes from step 1\n" in capfd.readouterr().out
    expected = summary(tmp_path / "runs" / "one")

    # The same by itself, streamed by a loading process that is far ahead when it goes back.
    rolling = [*ABSURD, *ROLLBACK, str(2.0**-68), "--loader", "streamed"]
    assert here("--run-name", "two", *rolling, "--loader-workers", "1") == 0
    _recovered(tmp_path / "runs" / "two", expected, num_resumes=0)

    # It fails in the sixth step after the rollback: one call is the sanity check's, and four came before.
    monkeypatch.setenv("TINY_FAULT", "raise 0 11")
    with pytest.raises(ValueError, match="on purpose"):
        here("--run-name", "three", *rolling, "--loader-workers", "0")
    monkeypatch.delenv("TINY_FAULT")
    capfd.readouterr()
    assert here("--resume", "three") == 0
    assert f"after 1 rollback the learning rate is × {2.0**-68:g} of the schedule\n" in capfd.readouterr().out
    _recovered(tmp_path / "runs" / "three", expected, num_resumes=1)


def _recovered(run: Path, expected: dict[str, Any], *, num_resumes: int) -> None:
    ended = summary(run)
    for name in ("weights_sha256", "sample_order_sha256", "steps", "samples_seen", "epochs_run", "validation"):
        assert ended[name] == expected[name], name
    assert (ended["num_rollbacks"], ended["num_resumes"], ended["stopped_by"]) == (1, num_resumes, "epochs")
    events = read_events(run / "events.jsonl")
    (noticed,) = [event for event in events if event["event"] == "divergence_noticed"]
    assert (noticed["step"], noticed["rolled_back_to_step"], noticed["rate_factor"]) == (4, 1, 2.0**-68)
    saved = [event["step"] for event in current_events(events) if event["event"] == "checkpoint_saved"]
    assert saved == sorted(saved)


class Drawn(IterableDataset[Tensor]):
    """Forty random numbers, others in every pass."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(3) for _ in range(40))


def test_a_stream_is_read_again_from_where_a_rollback_goes() -> None:
    def loader(num_processes: int) -> IterableLoader:
        share = Share(global_batch_size=16, accumulate=1, worker=0, num_workers=1)
        stream, device = Drawn(), torch.device("cpu")
        return IterableLoader(stream, 40, share, 0, 0, lambda data, draws: data, device, num_processes)

    plain, ahead = loader(0), loader(1)
    expected = [batch.data.tolist() for batch in plain.epoch(1, 16)]
    batches = ahead.epoch(2)
    next(batches)  # the loading process has read on by now
    batches.close()  # type: ignore[attr-defined]
    assert [batch.data.tolist() for batch in ahead.epoch(1, 16)] == expected
    ahead.close()
