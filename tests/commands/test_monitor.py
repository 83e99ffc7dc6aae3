"""The verb itself, in this process: a driver and a meter that are not there, signals that are sent to ourselves."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.commands import monitor
from stormo.commands.monitor import COLUMNS, lines, main, rows
from stormo.energy.meter import Meter
from stormo.energy.probes import Missing
from stormo.errors import EXIT_USAGE, SettingError, StormoError
from stormo.system.nvml import NvmlUnavailableError
from tests.energy.fakes import FakeDevice, FakeNvml, FakeProbe, gpu, sample

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

    monkeypatch.setattr(monitor, "open_nvml", lambda: driver)
    monkeypatch.setattr(monitor, "own_meter", own_meter)
    yield driver
    assert all(uuids == ["GPU-0", "GPU-1"] for uuids in asked)  # a part of a GPU has no energy of its own


def test_it_ends_after_the_count_with_the_energy(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PACE, "--count", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    said = out.splitlines()
    assert "gpu1 throttled: n/a: it does not tell" in said
    assert sum(line.startswith("gpu0 ") for line in said) == 2
    assert said[-2].startswith("watched for ")
    assert ", 2 samples, energy 100 J ± " in said[-2]
    assert said[-1] == "energy of cpu: n/a: root alone may read it"
    assert nvml.is_closed


def test_one_sample_has_no_summary(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--once"]) == 0
    out = capsys.readouterr().out
    assert "watched" not in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["node", "gpu0", "gpu1", "mig1-1"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well_and_signals_mean_what_they_did_before(
    nvml: FakeNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def interrupted(shown: Any) -> list[str]:
        # To the thread itself: any other thread of the test's process would take it from the process.
        signal.pthread_kill(threading.get_ident(), sent)
        return lines(shown)

    monkeypatch.setattr(monitor, "lines", interrupted)
    assert main(["--every", "60"]) == 0
    assert ", 1 sample, " in capsys.readouterr().out
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_closed_output_cannot_take_the_table(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(StormoError, match="its output is closed"):
        main(["--csv", "-"])


def test_the_table_goes_to_a_file_beside_the_view(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.csv"
    assert main([*PACE, "--count", "2", "--csv", str(path)]) == 0
    assert main([*PACE, "--count", "1", "--csv", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[3] for line in lines[1:]] == ["node", "gpu0", "gpu1", "mig1-1"] * 3
    assert "gpu0 " in capsys.readouterr().out


def test_the_table_on_the_output_has_it_alone(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PACE, "--count", "1", "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert [line.count(",") for line in out.splitlines()] == [len(COLUMNS) - 1] * 5
    assert "watched for" in err


def test_a_node_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise NvmlUnavailableError("no NVIDIA driver answers")

    monkeypatch.setattr(monitor, "open_nvml", refuse)
    assert main(["--once"]) == 0
    assert capsys.readouterr().out.startswith("GPU: n/a: no NVIDIA driver answers\n")


@pytest.mark.parametrize("options", [[], ["--csv", "-"]])
def test_it_ends_when_nobody_reads_and_nothing_is_kept(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    taken: list[int] = []
    watch = monitor._watch
    monkeypatch.setattr(monitor, "_watch", lambda *words: taken.append(watch(*words)) or taken[0])
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*PACE, "--count", "50", *options]) == 0
    assert taken == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0.01"], "--every 0.01 was set"),
        (["--every", "nan"], "--every nan was set"),
        (["--every", "inf"], "--every inf was set"),
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

    monkeypatch.setattr(monitor.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(monitor.signal, "sigtimedwait", wait)
    assert monitor._watch(dict, 1.0, 4, [take]) == 4
    assert [round(time_s - 100.0, 6) for time_s in taken_s] == [0.2, 1.2, 4.2, 5.2]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_device_has_a_row_and_units_are_in_the_names() -> None:
    cells = rows(sample(gpu(0, power_w=None), gpu(1, throttled=["power limit", "heat"]), gpu(3, uuid="MIG-abc")))
    node, first, second, part = (dict(zip(COLUMNS, row, strict=True)) for row in cells)
    assert node == {
        **dict.fromkeys(COLUMNS, ""),
        "time_utc": "2023-11-14T22:13:20.124Z",
        "time_unix_s": "1700000000.124",
        "host": "n1",
        "device": "node",
        "utilisation_fraction": "0.5",
        "memory_used_bytes": str(32 << 30),
        "memory_total_bytes": str(128 << 30),
        "power_w": "120",
        "temperature_c": "55",
        "clock_mhz": "2900",
        "num_cpus": "16",
        "load_1": "8",
        "disk_read_bytes_per_s": "1500000",
        "disk_write_bytes_per_s": "250",
        "network_in_bytes_per_s": "3000000000",
        "network_out_bytes_per_s": "4000",
    }
    assert (first["device"], first["uuid"], first["name"]) == ("gpu0", "GPU-0", "NVIDIA H200")
    assert (first["power_w"], first["throttled"]) == ("", "none")
    assert (second["power_w"], second["throttled"], part["device"]) == ("512.25", "power limit; heat", "mig3-abc")


def test_what_people_read() -> None:
    said = lines(sample(gpu(0, throttled=["heat"]), gpu(1, utilisation=None, throttled=None), cpu_power_w=0.0))
    assert said[0].endswith("n1: load 8.0; disk read 1.5 MB/s, written 250 B/s; network in 3 GB/s, out 4 kB/s")
    assert [" ".join(line.split()) for line in said[1:]] == [
        "device name use memory power temp clock slowed by",
        "node 16 CPUs 50 % 32.0/128.0 GiB 0 W 55 °C 2900 MHz",
        "gpu0 H200 97 % 20.0/140.0 GiB 512/700 W 61 °C 1980 MHz heat",
        "gpu1 H200 n/a 20.0/140.0 GiB 512/700 W 61 °C 1980 MHz",
    ]


def test_a_terminal_is_drawn_on_in_place(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*PACE, "--count", "2"]) == 0
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "Ctrl-C ends" in said
    assert max(len(line) for line in said.partition("watched")[0].splitlines()) <= 40


@pytest.mark.parametrize("there", ["time,power\n1,2\n", ",".join(COLUMNS), "\n"])
def test_a_file_with_other_columns_is_refused_and_left_alone(nvml: FakeNvml, tmp_path: Path, there: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(there)
    with pytest.raises(SettingError, match="columns of this table"):
        main(["--once", "--csv", str(path)])
    assert path.read_text() == there


def test_a_row_that_was_cut_is_dropped_before_the_next(nvml: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "node.csv"
    path.touch()
    assert main(["--once", "--csv", str(path)]) == 0
    path.write_bytes(path.read_bytes() + b"2023-11-14T22:13:20.124Z,17000" + b"\0" * 9000)
    assert main(["--once", "--csv", str(path)]) == 0
    assert [row["device"] for row in _read(path)] == ["node", "gpu0", "gpu1", "mig1-1"] * 2
