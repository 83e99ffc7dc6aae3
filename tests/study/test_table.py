"""Tables from elsewhere: what is read, and which line is named where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.study.table import Table, read_table

EXAMPLE = Path(__file__).parents[2] / "examples" / "t4_scaling.csv"


def read(folder: Path, text: str) -> Table:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return read_table(path, "strong")


def test_energy_of_an_image_is_watts_by_images_per_second() -> None:
    table = read_table(EXAMPLE, "weak")
    assert [(one.workers, one.units_per_s) for one in table.measurements] == [(1, 652.0), (4, 2500.0)]
    assert [one.j_per_sample for one in table.measurements] == pytest.approx([68 / 652, 280 / 2500])
    assert (table.energy_per, table.measurements[0].unit) == ("image", "images")


def test_times_and_energies_of_the_same_work(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,time_s,energy_j\n1,100,5000\n2,60,5400\n")
    assert [one.samples_per_s for one in table.measurements] == pytest.approx([0.01, 1 / 60])
    assert [one.j_per_sample for one in table.measurements] == pytest.approx([5000, 5400])


def test_energy_beside_speed_and_time_is_that_of_one_unit(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,tokens_per_s,time_s,energy_j\n1,50,10,1000\n")
    assert table.measurements[0].j_per_sample == pytest.approx(2.0)


def test_rows_without_a_repeat_are_counted_and_other_columns_are_named(tmp_path: Path) -> None:
    table = read(tmp_path, "# by hand\nworkers, units_per_s ,note\n1,10,a\n\n1,11,b\n2,20,c\n")
    assert [(one.workers, one.repeat) for one in table.measurements] == [(1, 1), (1, 2), (2, 1)]
    assert table.unused == ("note",)


def test_a_row_without_power_has_no_energy(tmp_path: Path) -> None:
    table = read(tmp_path, "workers,units_per_s,power_w\n1,10,50\n2,20,\n")
    assert [one.j_per_sample for one in table.measurements] == [5.0, None]
    assert "power_w" in table.measurements[1].energy_reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers,units_per_s\n1,10\ntwo,20\n", "line 3 has workers = 'two'"),
        ("workers,units_per_s\n0,10\n", "line 2 has workers = '0'"),
        ("workers,units_per_s\n1,-3\n", "line 2 has units_per_s = '-3'"),
        ("workers,units_per_s\n1,nan\n2,inf\n", "line 2 has units_per_s = 'nan', which is no number above 0; line 3"),
        ("workers,units_per_s\n1\n", "line 2 has 1 fields where the first line names 2"),
        ("workers,units_per_s\n\n1,10\n2,\n", "line 4 has no units_per_s"),
        ("workers,units_per_s,repeat\n1,10,1\n1,12,1\n", "line 3 repeats workers 1, repeat 1"),
        ("workers,units_per_s,power_w\n1,10,much\n", "line 2 has power_w = 'much'"),
        ("workers,units_per_s\n" + "x,1\n" * 7, "and 2 more"),
        ("workers,units_per_s\n", "no row of figures"),
        ("", "no row of figures"),
        ('"""Trains, and more.\n"""\nimport a\n', "its first line is none of names with commas between"),
        ("workers;units_per_s\n1;10\n", "its first line is none of names with commas between"),
        ("gpus,units_per_s\n1,10\n", "its columns are gpus, units_per_s"),
        ("workers,power_w\n1,10\n", "its columns are workers, power_w"),
        ("workers,workers,units_per_s\n1,1,10\n", "two columns workers"),
        ("workers,units_per_s,energy_j\n1,10,5\n", "energy_j without time_s"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_table(tmp_path / "none.csv", "strong")
