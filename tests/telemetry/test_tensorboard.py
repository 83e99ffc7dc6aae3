from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stormo.telemetry.record import EpochDone, Notice, Record, RunEnded, RunStarted, StepDone
from stormo.telemetry.tensorboard import TensorBoardFile, crc32c, frame


def started(resumed_at_step: int | None = None) -> RunStarted:
    return RunStarted(
        run_name="heron",
        run_folder="runs/heron",
        task="fashion-mnist",
        world_size=1,
        global_batch_size=8,
        epochs=2,
        steps_per_epoch=10,
        resumed_at_step=resumed_at_step,
    )


def step_done(step: int, loss: float) -> StepDone:
    return StepDone(
        epoch=1,
        step=step,
        step_in_epoch=step,
        samples_seen=8 * step,
        loss=loss,
        learning_rate=0.25,
        samples_per_s=100.0,
        units_per_s=100.0,
        unit="images",
        input_wait_fraction=0.5,
        train_time_s=1.0,
    )


def epoch_done(peak_memory_bytes: int | None, peak_reserved_memory_bytes: int | None = None) -> EpochDone:
    return EpochDone(
        epoch=1,
        step=300,
        samples_seen=2400,
        epoch_time_s=8.0,
        cumulative_time_s=8.0,
        validation_time_s=1.5,
        samples_per_s=300.0,
        units_per_s=300.0,
        unit="images",
        train_loss=1.25,
        learning_rate=0.25,
        input_wait_fraction=0.125,
        peak_memory_bytes=peak_memory_bytes,
        peak_reserved_memory_bytes=peak_reserved_memory_bytes,
        validation={"loss": 0.75, "accuracy": 0.5, "top5": 1.0},
    )


def write_file(folder: Path, records: Sequence[Record], *, time_unix_s: float = 1_700_000_000.0) -> None:
    sink = TensorBoardFile(folder, clock=lambda: time_unix_s)
    for record in records:
        sink.write(record)
    sink.close()


def read_back(folder: Path) -> Any:
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    accumulator = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        # RFC 3720, appendix B.4, and the check value of the algorithm.
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_gives_the_published_values(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def test_a_frame_is_length_checksum_data_checksum() -> None:
    framed = frame(b"abc")
    assert struct.unpack("<Q", framed[:8]) == (3,)
    assert framed[12:15] == b"abc"
    assert len(framed) == 8 + 4 + 3 + 4


def test_tensorboard_reads_back_every_scalar_at_its_step(tmp_path: Path) -> None:
    records: list[Record] = [
        started(),
        step_done(1, 2.5),
        step_done(130, 2.0),
        Notice(kind="info", text="x"),
        epoch_done(1 << 33, 1 << 34),
    ]
    write_file(tmp_path, [*records, RunEnded(summary={})])
    accumulator = read_back(tmp_path)
    points = {tag: [(p.step, p.value) for p in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    assert points == {
        "train/loss": [(1, 2.5), (130, 2.0)],
        "train/learning_rate": [(1, 0.25), (130, 0.25)],
        "train/images_per_second": [(1, 100.0), (130, 100.0)],
        "train/input_wait_fraction": [(1, 0.5), (130, 0.5)],
        "validation/loss": [(300, 0.75)],
        "validation/accuracy": [(300, 0.5)],
        "validation/top5": [(300, 1.0)],
        "epoch/number": [(300, 1.0)],
        "epoch/train_loss": [(300, 1.25)],
        "epoch/images_per_second": [(300, 300.0)],
        "epoch/input_wait_fraction": [(300, 0.125)],
        "epoch/training_time_s": [(300, 8.0)],
        "epoch/validation_time_s": [(300, 1.5)],
        "epoch/peak_memory_bytes": [(300, float(1 << 33))],
        "epoch/peak_reserved_memory_bytes": [(300, float(1 << 34))],
    }
    assert accumulator.Scalars("train/loss")[0].wall_time == 1_700_000_000.0


def test_memory_that_was_not_measured_has_no_point(tmp_path: Path) -> None:
    write_file(tmp_path, [started(), epoch_done(None)])
    assert not any("memory" in tag for tag in read_back(tmp_path).Tags()["scalars"])


def test_values_beyond_single_precision_become_infinite(tmp_path: Path) -> None:
    losses = [math.nan, math.inf, 1e300, -1e300]
    write_file(tmp_path, [started(), *(step_done(step, loss) for step, loss in enumerate(losses))])
    values = [point.value for point in read_back(tmp_path).Scalars("train/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, math.inf, -math.inf]


def test_a_point_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = TensorBoardFile(tmp_path)
    sink.write(started())
    sink.write(step_done(1, 2.5))
    assert len(read_back(tmp_path).Scalars("train/loss")) == 1
    sink.close()


def test_a_resumed_run_opens_a_second_file_and_its_points_replace_those_after_the_resume(tmp_path: Path) -> None:
    write_file(tmp_path, [started(), *(step_done(step, 1.0) for step in (8, 9, 10, 11, 12))])
    resumed: list[Record] = [started(resumed_at_step=10), *(step_done(step, 2.0) for step in (12, 13))]
    write_file(tmp_path, resumed, time_unix_s=1_700_000_100.0)
    assert len(list(tmp_path.iterdir())) == 2
    points = [(point.step, point.value) for point in read_back(tmp_path).Scalars("train/loss")]
    assert points == [(8, 1.0), (9, 1.0), (10, 1.0), (12, 2.0), (13, 2.0)]


def test_a_run_started_anew_in_the_same_folder_hides_every_older_point(tmp_path: Path) -> None:
    write_file(tmp_path, [started(), step_done(0, 1.0), step_done(5, 1.0)])
    write_file(tmp_path, [started(), step_done(3, 2.0)], time_unix_s=1_700_000_100.0)
    points = [(point.step, point.value) for point in read_back(tmp_path).Scalars("train/loss")]
    assert points == [(3, 2.0)]


def test_the_file_has_the_conventional_name(tmp_path: Path) -> None:
    write_file(tmp_path / "tensorboard", [started()])
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert re.fullmatch(r"events\.out\.tfevents\.1700000000\..+\.\d+\.0", path.name)


def test_a_sink_closed_before_the_run_started_leaves_no_file(tmp_path: Path) -> None:
    TensorBoardFile(tmp_path / "tensorboard").close()
    assert not (tmp_path / "tensorboard").exists()
