"""The real command with an absurd learning rate: it stops with a diagnosis, or goes back and recovers.

The rate is 0.25 in the first step and beyond all measure from the second on, whose weights give the third step a loss
that is huge, and the fourth one that is not a number. All factors are powers of two, so that a rate that was lowered by
one is the lower rate to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from stormo import checkpoint
from stormo.data.iterables import IterableLoader
from stormo.data.loaders import Share
from stormo.telemetry.files import current_events, read_events
from tests.test_train import checkpoints, stormo, summary

ABSURD = ["--base-lr", str(2.0**65), "--warmup-epochs", "1", "--warmup-from", str(2.0**-68), "--checkpoint-every", "1"]
PLAIN = ["--no-task.norm", "--num-gpus", "2"]


def test_an_absurd_rate_stops_the_run_and_its_last_good_checkpoint_goes_on_or_it_rolls_back(tmp_path: Path) -> None:
    done = stormo(tmp_path, *ABSURD, *PLAIN, "--run-name", "one")
    run = tmp_path / "runs" / "one"
    assert (done.returncode, done.stderr) == (65, "")
    said = done.stdout.splitlines()[-1]
    assert said.startswith("Diverged at step 4 (epoch 1): the training loss became ")
    assert " at that step, in step 4 of 8 of warm-up; 2 × --base-lr for the batch of 128, by the linear rule). " in said
    assert "Try --base-lr 1.84467e+19, --clip-norm 1, --lr-rule sqrt, " in said
    command = "stormo train --resume one --base-lr 1.84467e+19"
    assert said.endswith(f"The last good checkpoint is that of step 1; go on from it with: {command}")
    ended = summary(run)
    assert (ended["stopped_by"], ended["diverged_at_step"], ended["num_rollbacks"]) == ("divergence", 4, 0)
    good = [name for name in checkpoints(run) if name.startswith("step-")]
    assert good == ["step-00000001"]  # that of step 2 is set aside: its weights gave the huge loss
    weights = checkpoint.load(run / "checkpoints" / good[0]).model
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())

    by_hand = stormo(tmp_path, "--resume", "one", "--base-lr", "0.125")
    assert by_hand.returncode == 0, by_hand.stderr
    assert "Warning: one diverged at step 4; it goes on from step 1\n" in by_hand.stdout
    expected = summary(run)

    # The same by itself, streamed by loading processes that are far ahead when it goes back.
    rolling = [
        *ABSURD,
        *PLAIN,
        "--on-divergence",
        "rollback",
        "--rollback-factor",
        str(2.0**-68),
        "--loader",
        "streamed",
    ]
    rolled = stormo(tmp_path, *rolling, "--loader-workers", "1", "--run-name", "two")
    assert rolled.returncode == 0, rolled.stderr
    _recovered(tmp_path / "runs" / "two", expected, num_resumes=0)

    # Rank 0 is at its third call in the rehearsal's last; the run is killed in the sixth step after the rollback.
    killed = stormo(tmp_path, *rolling, "--loader-workers", "0", "--run-name", "three", fault="kill-job 0 11")
    assert killed.returncode == -9
    resumed = stormo(tmp_path, "--resume", "three")
    assert resumed.returncode == 0, resumed.stderr
    assert f"after 1 rollback the learning rate is × {2.0**-68:g} of the schedule\n" in resumed.stdout
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


def test_a_stream_is_read_again_from_where_a_rollback_goes_back_to() -> None:
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
