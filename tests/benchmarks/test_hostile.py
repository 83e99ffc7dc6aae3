"""A few of the hostile files of `python -m benchmarks.hostile`, and that it notices what gets through."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hostile import files
from benchmarks.hostile.__main__ import outcomes

_CHOSEN = (
    "summary.json is a pipe",
    "events.jsonl is a sparse file of 1 TB",
    "events.jsonl: a step of 4000 digits",
    "config.toml: a key of 60000 parts",
    "the page is written through a link",
    "model: tensors that share bytes",
    "a digest of other weights",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not one of pytest's, which nobody else can enter."""
    with tempfile.TemporaryDirectory(prefix="stormo-hostile-", dir="/tmp") as scratch:
        Path(scratch).chmod(0o755)
        yield Path(scratch)


def test_there_are_hundreds_of_cases_and_a_few_of_them_hold(folder: Path) -> None:
    healthy = files._train_healthy(folder)
    cases = files.all_cases(healthy)
    assert len({case.name for case in cases}) == len(cases) > 100
    chosen = [case for case in cases if case.name in _CHOSEN]
    assert len(chosen) == len(_CHOSEN)
    for case in chosen:
        light = tuple(verb for verb in case.verbs if not verb.startswith("resume"))
        verdict = files._try(folder, healthy, dataclasses.replace(case, verbs=light))
        assert not outcomes(verdict), verdict


def test_what_gets_through_is_noticed(folder: Path) -> None:
    healthy = folder / "healthy" / "good"

    def harmful(folders: files.CaseFolders) -> None:
        folders.precious.unlink()
        folders.marker.touch()

    verdict = files._try(folder, healthy, files.Case(name="none", change=harmful, verbs=("show",)))
    assert outcomes(verdict) == ["code_run", "deleted", "wrongly_accepted"]
