"""`world.log`: rank 0 writes into the run folder, and a script that is started again continues it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy
import pytest

from stormo.cli import main
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch.failure_reporter import FailureReporter
from stormo.report.history import read_history
from stormo.report.page import make_document
from stormo.script.world import World
from stormo.telemetry.folder import RunFolder
from tests.script.loops import Ranks, data, make
from tests.telemetry.test_tensorboard import read_back
from tests.telemetry.test_trackers import install


def _train(workers: Workers, folder: str) -> int:
    world = World._of(workers, FailureReporter(), run_folder=f"{folder}/run")
    model, optimizer = world.wrap(*make())
    world.load(f"{folder}/saved")
    for x, y in world.loader(data(), global_batch_size=20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        world.backward(loss)
        optimizer.step()
        world.log("loss", world.mean(loss.item()))
    world.log("first", numpy.zeros((4, 6, 3), numpy.uint8))
    world.save(f"{folder}/saved")
    world._log.close()
    return world._loop.num_steps


def test_two_starts_are_one_run(run_ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (2, 4):
        assert run_ranks(_train, 2, str(tmp_path)) == [steps, steps]
    folder = RunFolder(tmp_path / "run")
    assert [each.step for each in read_back(folder.tensorboard).Scalars("loss")] == [1, 2, 3, 4]
    document = make_document([read_history(folder)])
    (panel,) = [each for each in document["panels"] if each["id"] == "logged"]
    assert panel["charts"][0]["series"][0]["at"]["step"] == [1, 2, 3, 4]
    assert [row[1:] for row in panel["tables"][0]["rows"]] == [
        ["first", "2", "media/first-00000002.png"],
        ["first", "4", "media/first-00000004.png"],
    ]
    (picture,) = panel["pictures"]
    assert picture["title"] == "first, step 4"
    assert picture["address"].startswith("data:image/png;base64,iVBOR")
    assert main(["runs", "--runs-folder", str(tmp_path)]) == 0
    assert main(["show", "run", "--runs-folder", str(tmp_path)]) == 0
    assert "done" in capsys.readouterr().out


def _log_to_a_tool(workers: Workers, folder: str) -> str:
    install(Path(folder))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.syspath_prepend(folder)
        world = World._of(workers, FailureReporter(), run_folder=f"{folder}/run", sinks=["broken"])
        world.log("a", 1.0)
        world._log.close()
    sys.modules.pop("tiny_sink", None)
    return said.getvalue()


def test_a_tool_that_fails_costs_one_line_and_the_run_is_whole(run_ranks: Ranks, tmp_path: Path) -> None:
    (said,) = run_ranks(_log_to_a_tool, 1, str(tmp_path))
    reason = "ConnectionError: the server is gone"
    assert said == f"stormo: broken failed and gets no more of this run, which continues ({reason}).\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "script"


def test_a_value_needs_a_folder(run_ranks: Ranks) -> None:
    assert run_ranks(_log_nowhere, 1) == ["world.log('a') was called"]


def _log_nowhere(workers: Workers) -> str:
    with pytest.raises(SettingError) as refused:
        World._of(workers, FailureReporter()).log("a", 1.0)
    return refused.value.what


def _profiled(workers: Workers, folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORMO_PROFILE", "2:4")
        world = World._of(workers, FailureReporter(), run_folder=folder)
    model, optimizer = world.wrap(*make())
    for x, y in world.loader(data(), global_batch_size=8):
        optimizer.zero_grad()
        world.backward((model(x) - y).square().mean())
        optimizer.step()
    world._profile.close()
    return world._loop.num_steps


def test_a_profile_of_the_steps_that_were_named(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(_profiled, 2, str(tmp_path)) == [5, 5]
    found = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert found["steps"] == [2, 3]
    assert {path.name for path in (tmp_path / "profile").glob("*.gz")} == {
        f"rank-{rank}.pt.trace.json.gz" for rank in (0, 1)
    }
