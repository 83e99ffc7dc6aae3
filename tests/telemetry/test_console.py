from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stormo.telemetry.console import PlainConsole, TerminalConsole, epoch_line, make_console
from stormo.telemetry.record import (
    CheckpointSaved,
    DivergenceNoticed,
    EpochDone,
    Notice,
    RunEnded,
    RunStarted,
    Sink,
    StepDone,
    ValidationProgress,
)
from stormo.telemetry.text import encodable, format_clock, format_duration, format_figure, format_rate, run_reference
from tests.golden import check_golden

GOLDEN = Path(__file__).parent / "golden"
HIDE_CURSOR = "\x1b[?25l"
EXPLANATION = (
    "global batch 2048 = 512 per worker × 4 workers × 1 accumulation",
    "learning rate 0.04 = 0.01 × 4 (linear), warm-up over 5 epochs, then constant [until the end] of the run",
)


class FakeTerminal(io.StringIO):
    """A text buffer that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class AsciiTerminal(io.TextIOWrapper):
    """A terminal of a locale without Unicode."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", write_through=True)

    def isatty(self) -> bool:
        return True

    def getvalue(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("ascii")


def started(*, epochs: int = 40, steps_per_epoch: int = 30) -> RunStarted:
    return RunStarted(
        run_name="brisk-heron",
        run_folder="/data/runs/brisk-heron",
        task="fashion-mnist",
        world_size=4,
        global_batch_size=2048,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        explanation=EXPLANATION,
    )


def step_done(step_in_epoch: int = 15, *, samples_per_s: float = 2048.0, input_wait_fraction: float = 0.0) -> StepDone:
    return StepDone(
        epoch=1,
        step=step_in_epoch,
        step_in_epoch=step_in_epoch,
        samples_seen=2048 * step_in_epoch,
        loss=1.2345,
        learning_rate=0.04,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s,
        unit="images",
        input_wait_fraction=input_wait_fraction,
        train_time_s=1.0,
    )


def epoch_done(epoch: int = 1, *, validation: Mapping[str, float] | None = None) -> EpochDone:
    return EpochDone(
        epoch=epoch,
        step=30 * epoch,
        samples_seen=61440 * epoch,
        epoch_time_s=24.508,
        cumulative_time_s=24.508 * epoch,
        validation_time_s=1.2,
        samples_per_s=2423.378,
        units_per_s=2423.378,
        unit="images",
        train_loss=2.1234,
        learning_rate=1.25e-05,
        input_wait_fraction=0.01,
        peak_memory_bytes=None,
        validation={"loss": 2.4834, "accuracy": 0.1692} if validation is None else validation,
    )


def ended(**changes: object) -> RunEnded:
    summary = {
        "validation_accuracy": 0.8615,
        "train_time_s": 147.0,
        "wall_time_s": 3723.0,
        "images_per_s": 2423.38,
        "time_to_target_s": 140.1,
        "stopped_by": "target",
    }
    return RunEnded(summary={**summary, **changes})


def ticking() -> Callable[[], float]:
    """A clock on which every look is a second later."""
    now_s = iter(range(1_000_000))
    return lambda: float(next(now_s))


def terminal(
    stream: FakeTerminal | AsciiTerminal,
    *,
    columns: int = 80,
    clock: Callable[[], float] | None = None,
    **variables: str,
) -> TerminalConsole:
    environ = {"TERM": "xterm-256color", "COLUMNS": str(columns), **variables}
    console = make_console(stream, environ=environ, clock=clock or ticking())
    assert isinstance(console, TerminalConsole)
    return console


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def screen_lines(text: str) -> list[str]:
    """Everything that ever stood on one line of the terminal."""
    return re.split(r"[\r\n]+", without_escapes(text))


def play_whole_run(console: Sink, *, epochs: int = 40, steps_per_epoch: int = 30) -> None:
    for record in (
        started(epochs=epochs, steps_per_epoch=steps_per_epoch),
        step_done(steps_per_epoch // 2, input_wait_fraction=0.12),
        ValidationProgress(epoch=1, done=2500, total=10000),
        epoch_done(1),
        CheckpointSaved(epoch=1, step=30, path="checkpoints/step-00000030", weights_sha256="", save_time_s=0),
        Notice(kind="warning", text="--clip-norm 1.0 is ignored because the optimizer scales every layer."),
        Notice(kind="info", text="Shown to Prometheus at http://127.0.0.1:9701/metrics"),
        epoch_done(2),
        DivergenceNoticed(
            epoch=3, step=75, kind="loss", loss=float("nan"), learning_rate=0.04, rolled_back_to_step=60,
            rate_factor=0.5, text="The loss is nan at step 75; the run goes on from step 60 with half the rate.",
        ),
        Notice(kind="stop", text="Early stopping after epoch 2"),
        ended(),
    ):  # fmt: skip
        console.write(record)
    console.close()


def test_the_whole_output_of_a_run_in_a_log_and_on_a_terminal() -> None:
    plain = io.StringIO()
    log = make_console(plain, environ={"TERM": "xterm"})
    assert isinstance(log, PlainConsole)
    play_whole_run(log)
    check_golden(GOLDEN / "train.txt", plain.getvalue())
    stream = FakeTerminal()
    play_whole_run(terminal(stream))
    lines = [line.rstrip() for line in screen_lines(stream.getvalue())]
    check_golden(GOLDEN / "train_terminal.txt", "\n".join(line for line in lines if line) + "\n")


@pytest.mark.parametrize(
    ("validation", "tail"),
    [
        ({"loss": 1.0}, ", Validation Loss = 1.000"),
        ({}, "Images/sec = 2423.38"),
        ({"loss": float("nan"), "accuracy": 0.0}, ", Validation Loss = nan, Validation Accuracy = 0.000"),
        (
            {"top5": 0.99, "mean_error": 12.5, "accuracy": 0.5, "loss": 1.0},
            ", Validation Loss = 1.000, Validation Accuracy = 0.500, Validation Top5 = 0.990, "
            "Validation Mean Error = 12.500",
        ),
    ],
)
def test_the_plain_line_has_loss_and_accuracy_where_known_then_the_other_metrics(
    validation: Mapping[str, float], tail: str
) -> None:
    assert epoch_line(epoch_done(validation=validation)).endswith(tail)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert isinstance(make_console(FakeTerminal(), environ={"TERM": "dumb"}), PlainConsole)


def test_every_plain_line_is_flushed_on_its_own() -> None:
    class Counting(io.StringIO):
        flushed_lengths: tuple[int, ...] = ()

        def flush(self) -> None:
            self.flushed_lengths += (len(self.getvalue()),)

    stream = Counting()
    PlainConsole(stream).write(started())
    lines = [*EXPLANATION, f"run folder: {started().run_folder}"]
    assert stream.getvalue().splitlines() == lines
    assert stream.flushed_lengths == tuple(itertools.accumulate(len(line) + 1 for line in lines))


def test_signs_a_plain_stream_cannot_encode_become_plain_ones() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert encodable("512 × 4 → 2048 · é", stream) == "512 x 4 -> 2048 - ?"
    assert encodable("512 × 4", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == "512 × 4"


def test_a_reader_that_goes_away_turns_the_plain_console_off_without_an_error() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        console = make_console(stream)
        os.close(reader)
        console.write(epoch_done(1))
        console.write(epoch_done(2))
        console.close()
    # Leaving the block closed the stream, which would raise if its buffer still led into the broken pipe.


def test_a_full_disk_is_not_taken_for_a_reader_that_went_away() -> None:
    with Path("/dev/full").open("w") as stream, Path(os.devnull).open("w") as null:
        console = make_console(stream)
        with pytest.raises(OSError, match="No space left"):
            console.write(epoch_done(1))
        os.dup2(null.fileno(), stream.fileno())  # so that closing the stream can flush what is left


def test_a_program_piped_into_head_ends_well_and_says_nothing_on_stderr(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from stormo.telemetry.console import make_console\n"
        "from stormo.telemetry.record import Notice\n"
        "console = make_console(sys.stdout)\n"
        "for number in range(20000):\n"
        "    console.write(Notice(kind='info', text=f'line {number}'))\n"
        "console.close()\n"
        "print('more')\n"
        "print('trained to the end', file=sys.stderr)\n",
        encoding="utf-8",
    )
    command = f'set -o pipefail; "{sys.executable}" "{program}" | head -n 1'
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environ, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\n", "trained to the end\n")


def test_every_figure_of_the_live_line_fits_at_80_columns() -> None:
    stream = FakeTerminal()
    console = terminal(stream)
    console.write(started(epochs=90, steps_per_epoch=235))
    console.write(step_done(134, samples_per_s=2048.0 / 10, input_wait_fraction=0.5))
    console.close()
    live = next(line for line in screen_lines(stream.getvalue()) if line.startswith("epoch 1/90"))
    assert live.split("  ")[1:] == [" 57 %", "134/235", "205 img/s", "loss 1.2345", "ETA 16:50", "wait 50 %"]


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(2, 30), (1000, 100_000)])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_on_the_terminal_is_ever_wider_than_the_terminal(
    columns: int, epochs: int, steps_per_epoch: int
) -> None:
    stream = FakeTerminal()
    play_whole_run(terminal(stream, columns=columns), epochs=epochs, steps_per_epoch=steps_per_epoch)
    lines = screen_lines(stream.getvalue())
    assert max(len(line) for line in lines) <= columns
    assert any("brisk-heron · fashion-mnist" in line for line in lines)
    assert any("0.1692" in line for line in lines)


def test_a_figure_the_summary_does_not_have_is_left_out() -> None:
    stream = FakeTerminal()
    console = terminal(stream)
    console.write(started())
    console.write(ended(time_to_target_s=None, validation_accuracy=None, stopped_by="signal"))
    console.close()
    text = without_escapes(stream.getvalue())
    assert "time to target" not in text
    assert "accuracy" not in text
    assert "stopped by a signal" in text


def test_a_task_without_accuracy_has_no_such_column_and_its_own_metric_has_one() -> None:
    stream = FakeTerminal()
    console = terminal(stream, columns=100)
    console.write(started())
    console.write(epoch_done(1, validation={"loss": 1.0, "perplexity": 2.7183}))
    console.write(epoch_done(2, validation={"loss": 1.0}))
    console.close()
    text = without_escapes(stream.getvalue())
    assert "accuracy" not in text
    assert "perplexity" in text
    assert "    2.7183" in text
    assert "       n/a" in text


def test_a_narrow_terminal_drops_the_least_important_columns() -> None:
    stream = FakeTerminal()
    play_whole_run(terminal(stream, columns=40))
    assert "epoch val loss accuracy  images/s" in [line.rstrip() for line in screen_lines(stream.getvalue())]
    stream = FakeTerminal()
    play_whole_run(terminal(stream, columns=20))
    lines = [line.rstrip() for line in screen_lines(stream.getvalue())]
    assert lines[lines.index("training time") + 1] == "2:27"  # whole, though no column is wide enough beside it


def test_input_wait_is_shown_only_above_five_percent() -> None:
    stream = FakeTerminal()
    console = terminal(stream)
    console.write(started())
    console.write(step_done(1, input_wait_fraction=0.05))
    assert "wait 5" not in without_escapes(stream.getvalue())
    console.write(step_done(2, input_wait_fraction=0.06))
    assert "wait 6 %" in without_escapes(stream.getvalue())
    console.close()


def test_the_live_line_is_redrawn_at_most_ten_times_a_second_and_by_no_thread() -> None:
    num_threads = threading.active_count()
    stream = FakeTerminal()
    now_s = 0.0
    console = terminal(stream, clock=lambda: now_s)
    console.write(started(steps_per_epoch=1000))
    for step in range(1, 1001):
        now_s = step * 0.001  # a thousand records in one second
        console.write(step_done(step))
    assert threading.active_count() == num_threads
    assert 9 <= without_escapes(stream.getvalue()).count("img/s") <= 11
    console.close()


def test_the_cursor_is_never_hidden() -> None:
    stream = FakeTerminal()
    play_whole_run(terminal(stream))
    assert HIDE_CURSOR not in stream.getvalue()


def test_a_run_that_fails_leaves_an_empty_line_and_the_original_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    console = terminal(stream)
    console.write(started())
    console.write(step_done())
    assert sys.stdout is not stream  # prints of the task go above the live line
    console.close()
    console.close()
    assert sys.stdout is stream
    assert stream.getvalue().endswith("\x1b[2K")  # the line was erased and the cursor stands at its start


def test_the_bar_of_an_epoch_is_not_drawn_again_below_its_row() -> None:
    stream = FakeTerminal()
    console = terminal(stream)
    console.write(started())
    console.write(step_done())
    length = len(stream.getvalue())
    console.write(epoch_done())
    assert "img/s" not in stream.getvalue()[length:]
    console.close()


def test_a_print_of_the_task_stands_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    console = terminal(stream)
    console.write(started())
    console.write(step_done())
    print("hello from the task")
    console.close()
    assert "hello from the task" in screen_lines(stream.getvalue())


def test_no_color_is_honoured() -> None:
    plain, coloured = FakeTerminal(), FakeTerminal()
    play_whole_run(terminal(plain, NO_COLOR="1"))
    play_whole_run(terminal(coloured, NO_COLOR=""))
    colour = re.compile(r"\x1b\[(?:\d+;)*3[0-7]m")
    assert not colour.search(plain.getvalue())
    assert colour.search(coloured.getvalue())


def test_a_terminal_without_unicode_gets_only_ascii() -> None:
    stream = AsciiTerminal()
    play_whole_run(terminal(stream))
    text = without_escapes(stream.getvalue())
    assert "512 per worker x 4 workers" in text
    assert re.search(r"epoch 1/40 #+-+ ", text)


def test_a_terminal_that_is_closed_turns_the_console_off_without_an_error() -> None:
    controller, terminal_fd = pty.openpty()
    with os.fdopen(terminal_fd, "w") as stream:
        console = make_console(stream, environ={"TERM": "xterm", "COLUMNS": "80"}, clock=ticking())
        assert isinstance(console, TerminalConsole)
        console.write(started())
        os.close(controller)
        console.write(step_done())
        console.write(epoch_done())
        console.write(ended())
        console.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00"),
        (3599.6, "1:00:00"),
        (360000.0, "100:00:00"),
        (float("inf"), "n/a"),
    ],
)
def test_durations_read_naturally_at_every_scale(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_figures_keep_their_column_when_they_grow() -> None:
    assert [format_rate(rate) for rate in (9.96, 99.96, 1234567.8)] == ["10.0", "100", "1,234,568"]
    assert [format_figure(loss) for loss in (0.12345, 999.9, 12345.6, float("nan"))] == [
        "0.1235",
        "999.9000",
        "1.23e+04",
        "nan",
    ]
    assert format_clock(-1.0) == "0:00"


def test_a_run_is_referred_to_by_name_in_the_default_place_and_else_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_reference("heron", "runs/heron") == "heron"
    assert run_reference("heron", str(tmp_path / "runs" / "heron")) == "heron"
    assert run_reference("heron", "/data/my runs/heron") == "'/data/my runs/heron'"
