"""The verb itself, in this process: a driver and a meter that are not there, signals that are sent to ourselves."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.commands.monitor import command, main
from stormo.commands.monitor.table import COLUMNS
from stormo.commands.monitor.view import PlainView
from stormo.energy.meter import Meter
from stormo.energy.nvml import NvmlUnavailableError
from stormo.energy.probes import Missing
from stormo.errors import EXIT_USAGE, StormoError
from stormo.telemetry import text
from tests.commands.monitor.fakes import FakeDevice, FakeNvml, FakeProbe

PACE = ("--every", "0.1")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A node with two GPUs, one of them split, and a counter on the first."""
    driver = FakeNvml(FakeDevice(0, throttled=("heat",)), FakeDevice(1, throttled=None), FakeDevice(1, parent="GPU-1"))
    asked: list[list[str]] = []

    def own_meter(uuids: list[str], node_id: str) -> tuple[Meter, list[Missing]]:
        asked.append(uuids)
        missing = [Missing(kind="cpu", reason="root alone may read it")]
        return Meter([FakeProbe()], missing=missing), missing

    monkeypatch.setattr(command, "open_nvml", lambda: driver)
    monkeypatch.setattr(command, "own_meter", own_meter)
    yield driver
    assert all(uuids == ["GPU-0", "GPU-1"] for uuids in asked)  # a part of a GPU has no energy of its own


def test_it_ends_after_the_count_with_a_summary(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PACE, "--count", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert "gpu1 throttled: n/a: it does not tell" in lines
    assert sum("gpu0 H200: 50 %" in line for line in lines) == 2
    at = lines.index("")
    assert lines[at + 1].startswith("watched for ")
    assert lines[at + 1].endswith(", 2 samples")
    assert lines[at + 2].startswith("CPU: use ")
    assert "gpu0 H200: use mean 50 %, highest 50 %; power mean 350 W, highest 350 W" in lines
    (energy,) = [line for line in lines if line.startswith("energy: ")]
    assert energy.startswith("energy: 100 J ± ")
    assert energy.endswith("(0.0278 Wh): 1 GPU 100 J by counter")
    assert lines[-1] == "energy of CPU package: n/a: root alone may read it"
    assert nvml.is_closed


def test_one_sample_has_rates_and_no_summary(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--once"]) == 0
    out = capsys.readouterr().out
    assert "watched" not in out
    assert sum(" H200: 50 %" in line for line in out.splitlines()) == 3


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well_and_signals_mean_what_they_did_before(
    nvml: FakeNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    show = PlainView.show

    def interrupted(view: PlainView, sample: dict[str, Any]) -> bool:
        # To the thread itself: any other thread of the test's process would take it from the process.
        signal.pthread_kill(threading.get_ident(), sent)
        return show(view, sample)

    monkeypatch.setattr(PlainView, "show", interrupted)
    assert main(["--every", "60"]) == 0
    assert ", 1 sample\n" in capsys.readouterr().out
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_signal_that_comes_again_does_not_take_the_summary(
    nvml: FakeNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = text.write_text

    def interrupted(said: str, stream: Any) -> bool:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return write_text(said, stream)

    monkeypatch.setattr(command, "write_text", interrupted)
    assert main([*PACE, "--count", "1"]) == 0
    assert "watched for" in capsys.readouterr().out


def test_a_closed_output_cannot_take_the_table(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(StormoError, match="--csv - was set, but the output is closed"):
        main(["--csv", "-"])


def test_the_table_goes_to_a_file_beside_the_view(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.csv"
    assert main([*PACE, "--count", "2", "--csv", str(path)]) == 0
    assert main([*PACE, "--count", "1", "--csv", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[3] for line in lines[1:]] == ["node", "gpu0", "gpu1", "mig1"] * 3
    assert "gpu0 H200: 50 %" in capsys.readouterr().out


def test_the_table_on_the_output_has_it_alone(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PACE, "--count", "1", "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert [line.count(",") for line in out.splitlines()] == [len(COLUMNS) - 1] * 5
    assert "watched for" in err


def test_a_node_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise NvmlUnavailableError("no NVIDIA driver answers")

    monkeypatch.setattr(command, "open_nvml", refuse)
    assert main(["--once"]) == 0
    assert capsys.readouterr().out.startswith("GPU: n/a: no NVIDIA driver answers\n")


def test_it_ends_when_nobody_reads_and_nothing_is_kept(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*PACE]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0.01"], "--every 0.01 was set, but devices renew their figures about every 0.1 s"),
        (["--every", "nan"], "--every nan was set"),
        (["--every", "inf"], "--every inf was set"),
        (["--every", "1e300"], "--every 1e+300 was set, but at least one sample a day = 86400 s is taken"),
        (["--every", "soon"], "invalid float value: 'soon'"),
        (["--count", "0"], "--count 0 was set, but at least one sample is taken"),
        (["--count", "1", "--once"], "not allowed with"),
        (["--csv", "/absent/node.csv"], "--csv /absent/node.csv was set, but it cannot be written"),
        (["gpu0"], "unrecognized arguments: gpu0"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(nvml: FakeNvml, arguments: list[str], said: str) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(StormoError) as caught:
        main(arguments)
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")
    assert caught.value.exit_code == EXIT_USAGE
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_moments_that_have_passed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, taken_s = [100.0], []

    def wait(signals: Any, timeout_s: float) -> None:
        now_s[0] += timeout_s

    def take(sample: dict[str, Any]) -> bool:
        taken_s.append(now_s[0])
        now_s[0] += 2.5 if len(taken_s) == 2 else 0.25  # the second takes longer than the pace
        return True

    monkeypatch.setattr(command.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(command.signal, "sigtimedwait", wait)
    command._watch(dict, 1.0, 4, take)
    assert [round(time_s - 100.0, 6) for time_s in taken_s] == [0.2, 1.2, 4.2, 5.2]
