"""The largest model that a device trains."""

from __future__ import annotations

import argparse
import json
import time

import pytest

from benchmarks import largest_model
from benchmarks.largest_model import Try, num_parameters, result, too_large, train_one_step, tries_of

GIB = 2**30


def test_what_cannot_fit_is_known_by_arithmetic() -> None:
    needed = 16 * num_parameters("6.7b")
    assert too_large("6.7b", "plain", needed, 0) == ""
    assert too_large("6.7b", "plain", 80 * GIB, 1e15) == "needs 96 GiB of the 80 of the device"
    assert too_large("6.7b", "both", 80 * GIB, 1e15) == ""
    assert too_large("6.7b", "offload", 1e15, 64 * GIB) == "needs 96 GiB of the 64 of the host"


def test_presets_are_tried_from_the_largest_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(way: str, preset: str, *_: object) -> Try:
        return Try(way=way, preset=preset, fits=preset != "2.7b", note="")

    monkeypatch.setattr(largest_model, "attempt", attempt)
    options, later_s = argparse.Namespace(presets=["125m", "350m", "1b", "2.7b"]), time.monotonic() + 60
    found = tries_of("plain", options, (1e15, 1e15), later_s)
    assert [(one.preset, one.fits) for one in found] == [("2.7b", False), ("1b", True)]
    small = tries_of("plain", options, (4 * GIB, 1e15), later_s)
    assert [(one.preset, one.fits) for one in small] == [
        ("2.7b", False),
        ("1b", False),
        ("350m", False),
        ("125m", True),
    ]
    late = tries_of("both", options, (1e15, 1e15), time.monotonic() - 1)
    assert [one.note for one in late] == ["not known: the budget of time is spent"] * 4
    words = result([*found, *late]).split()
    assert words[:3] == ["RESULT", "plain=1b", f"plain_parameters={num_parameters('1b')}"]
    assert words[-2:] == ["both=none", "both_parameters=0"]


def test_a_try_takes_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(device="cpu", way="both", try_preset="tiny", batch_size=1, memory_gib=None)
    assert train_one_step(options) == 0
    assert 5 < json.loads(capsys.readouterr().out)["loss"] < 7
