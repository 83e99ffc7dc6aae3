"""The benchmark of link settings, tried on CPU processes; its figures come from what the ranks measured."""

from __future__ import annotations

import re

import pytest

from benchmarks import link_settings, rank_pool
from stormo.config.link import CANDIDATES
from tests import forked

SETTINGS = [{}, *CANDIDATES]


def test_cpu_processes_go_through_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rank_pool, "_PRELOAD", forked.PRELOAD)  # one server for all tests
    monkeypatch.setattr(link_settings, "CANDIDATES", CANDIDATES[:1])
    small = ["--width", "0.0625", "--steps", "2", "--rounds", "1"]
    assert link_settings.main(["--device", "cpu", "--workers", "2", *small]) == 0
    *_, default, other, last = capsys.readouterr().out.splitlines()
    assert default.startswith("NCCL's defaults")
    assert other.startswith("1 channel, 1 socket thread, 4 sockets each, buffers of 8 MiB")
    found = dict(word.split("=") for word in last.removeprefix("RESULT ").split())
    assert list(found) == ["workers", "default_ms", "chosen_ms", "best_ms"]
    assert all(float(value) > 0 for value in found.values())


def test_the_chosen_setting_has_the_fastest_bucket_of_those_that_are_tried() -> None:
    buckets, steps = [14.0, 9.0, 10.0, 8.0, 7.0, 6.0], [44.0, 35.0, 36.0, 38.0, 41.0, 49.0]

    def figures(multiprocessors: int) -> dict[str, float]:
        found = [[(bucket, step, multiprocessors)] for bucket, step in zip(buckets, steps, strict=True)]
        return link_settings.figures(SETTINGS, found)

    assert figures(16) == {"default_ms": 44.0, "chosen_ms": 35.0, "best_ms": 35.0}  # of those with one channel
    assert figures(132) == {"default_ms": 44.0, "chosen_ms": 49.0, "best_ms": 35.0}


def test_without_slices_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(link_settings, "data_folder", str)
    monkeypatch.setattr(link_settings, "find_devices", lambda: link_settings.cpu_processes(2))
    assert link_settings.main(["--workers", "4"]) == 2
    assert re.search(r"is 2 processes on .* cores: cut a GPU with `stormo doctor --slices 7`", capsys.readouterr().err)


@pytest.mark.parametrize("flags", [["--workers", "1"], ["--rounds", "0"], ["--steps", "0"]], ids=" ".join)
def test_too_few_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        link_settings.main(["--device", "cpu", *flags])
    assert ended.value.code == 2
    assert "set --workers 2, --rounds 1, --steps 1 or more" in capsys.readouterr().err
