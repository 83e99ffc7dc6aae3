from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pytest

from stormo.commands.monitor import table
from stormo.commands.monitor.table import COLUMNS, CsvFile, CsvStream, rows
from stormo.errors import EXIT_USAGE, SettingError, StormoError
from tests.commands.monitor.fakes import gpu, sample

HEADER = ",".join(COLUMNS)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, *samples: dict[str, object]) -> None:
    file = CsvFile(path)
    for each in samples:
        file.write(each)
    file.close()


def test_every_device_has_a_row_and_units_are_in_the_names(tmp_path: Path) -> None:
    path = tmp_path / "node.csv"
    append(path, sample(gpu(0), gpu(1, throttled=["power limit", "heat, by hardware"])))
    node, first, second = read(path)
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
    assert (first["device"], first["uuid"], first["name"], first["power_w"]) == (
        "gpu0",
        "GPU-0",
        "NVIDIA H200",
        "512.25",
    )
    assert first["throttled"] == "none"
    assert second["throttled"] == "power limit; heat, by hardware"
    assert second["device"] == "gpu1"


def test_what_is_not_known_is_an_empty_cell() -> None:
    _, row = rows(sample(gpu(power_w=None, throttled=None, utilisation=0.0)))
    cells = dict(zip(COLUMNS, row, strict=True))
    assert (cells["power_w"], cells["throttled"], cells["utilisation_fraction"]) == ("", "", "0")


def test_a_part_of_a_gpu_is_named_so() -> None:
    _, row = rows(sample(gpu(3, uuid="MIG-abc")))
    assert dict(zip(COLUMNS, row, strict=True))["device"] == "mig3"


def test_it_goes_on_in_its_own_file_with_one_header(tmp_path: Path) -> None:
    path = tmp_path / "node.csv"
    append(path, sample(), sample(gpu()))
    append(path, sample())
    lines = path.read_text().splitlines()
    assert lines.count(HEADER) == 1
    assert len(read(path)) == 4


def test_a_row_that_was_cut_is_dropped_before_going_on(tmp_path: Path) -> None:
    path = tmp_path / "node.csv"
    append(path, sample())
    whole = path.read_bytes()
    path.write_bytes(whole + b"2023-11-14T22:13:20.124Z,17000" + b"\0" * 9000)
    append(path, sample())
    assert path.read_bytes() == whole + whole.splitlines(keepends=True)[1]


@pytest.mark.parametrize("there", ["time,power\n1,2\n", HEADER, HEADER.replace("power_w", "power") + "\n", "\n"])
def test_a_file_with_other_columns_is_refused_and_left_alone(tmp_path: Path, there: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(there)
    with pytest.raises(SettingError, match="columns of this table") as caught:
        CsvFile(path)
    assert caught.value.exit_code == EXIT_USAGE
    assert path.read_text() == there


def test_what_another_monitor_appends_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.csv"
    append(path, sample())
    find = table._end_of_last_line

    def late(file: io.BufferedReader, size_bytes: int) -> int:
        with path.open("a") as other:
            other.write("of the other\n")
        return find(file, size_bytes)

    monkeypatch.setattr(table, "_end_of_last_line", late)
    append(path, sample())
    assert path.read_text().splitlines()[2] == "of the other"


def test_a_pipe_gets_the_table_and_says_when_its_reader_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(SettingError, match="it cannot be written"):
        CsvFile(path)  # nobody reads
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = CsvFile(path)
    assert os.read(reading, 4096).decode() == HEADER + "\n"
    os.close(reading)
    with pytest.raises(StormoError, match=r"cannot be written any more \(Broken pipe\)"):
        file.write(sample())
    file.close()


def test_an_empty_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.touch()
    append(path, sample())
    assert path.read_text().startswith(HEADER + "\n")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "node.csv"):
        with pytest.raises(SettingError, match=r"--csv .* was set, but it cannot be written \(.*\); name another file"):
            CsvFile(path)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.csv"
    file = CsvFile(path)
    file.write(sample())
    whole = path.read_bytes()
    real = os.write
    monkeypatch.setattr(table.os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    with pytest.raises(StormoError, match="cannot be written any more"):
        file.write(sample())
    file.close()
    assert path.read_bytes() == whole


def test_the_output_gets_the_same_table(tmp_path: Path) -> None:
    path, stream = tmp_path / "node.csv", io.StringIO()
    append(path, sample(gpu()))
    CsvStream(stream).write(sample(gpu()))
    assert stream.getvalue() == path.read_text()
