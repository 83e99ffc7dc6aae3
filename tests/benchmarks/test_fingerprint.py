"""The digests see one bit, one swap and one figure; the same run has the same digests, another seed has others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import fingerprint
from tests import forked

STEP = {"samples": [0, 1], "loss": 0.5}


def leave(folder: Path, weight: float = 1.0, samples: tuple[int, ...] = (2, 3), loss: float = 0.25) -> dict[str, str]:
    """The digests of what a rank leaves behind."""
    folder.mkdir()
    save_file({"b": torch.tensor([weight, 2.0]), "a": torch.tensor(3)}, folder / "weights")
    lines: list[dict[str, Any]] = [STEP, {}, {"samples": samples, "loss": loss}, {}]
    (folder / "rank-0").write_text("\n".join(map(json.dumps, lines)))
    (folder / "metrics").write_text("[1, 0.5]")
    return fingerprint.fingerprint(folder, None)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({}, []),
        ({"weight": torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()}, ["weights"]),
        ({"samples": (3, 2)}, ["order"]),
        ({"loss": 0.25000000000000006}, ["metrics"]),
    ],
)
def test_a_bit_of_a_weight_a_swap_and_a_figure_change_their_digest_alone(
    tmp_path: Path, changed: dict[str, Any], differs: list[str]
) -> None:
    before, after = leave(tmp_path / "before"), leave(tmp_path / "after", **changed)
    assert [part for part in fingerprint.PARTS if before[part] != after[part]] == differs
    assert fingerprint.verdict(after, before) == (f"differs: {differs[0]}" if differs else "equal")


def test_micro_batches_that_are_rolled_back_do_not_count() -> None:
    trained = {"samples": [2, 3], "loss": 0.25}
    assert fingerprint.last_epoch([STEP, STEP, {}, STEP, {}, {}, trained, trained, {}]) == [trained, trained]
    assert fingerprint.last_epoch([STEP, trained]) == [STEP, trained]
    assert fingerprint.last_epoch([]) == []


def test_a_machine_without_a_section_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text('{"another machine": {}}')
    assert fingerprint.main(["--check", "--file", str(tmp_path / "file")]) == 2
    assert fingerprint.machine() in capsys.readouterr().out


def write_digests(case: str, folder: Path, path: Path) -> None:
    path.write_text(json.dumps(fingerprint.run_case(fingerprint.CASES[case], folder, None)))


def test_a_run_is_reproducible_and_its_seed_is_seen(tmp_path: Path) -> None:
    found = []
    for number, case in enumerate(("seed 0", "seed 0", "seed 3")):
        path = tmp_path / f"{number}.json"
        forked.fork(write_digests, (case, tmp_path / f"run-{number}", path)).join()
        found.append(json.loads(path.read_text()))
    assert fingerprint.verdict(found[1], found[0]) == "equal"
    assert fingerprint.verdict(found[2], found[0]) == "differs: weights, order, metrics"
