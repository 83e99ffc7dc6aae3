"""What a run names itself is imported only where the user could have named it, and starts only so many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.errors import EXIT_USAGE, SettingError
from stormo.telemetry.folder import RunFolder
from stormo.training import resume
from stormo.training.resume import require_few_processes, require_own


@pytest.mark.parametrize("foreign", ["run", "run/config.toml", "task.py"])
def test_the_task_of_a_run_of_somebody_elses_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "task.py").write_text("open('code-was-run', 'w')\n")
    if os.geteuid() == 0:
        os.chown(tmp_path / "task.py", 12345, -1)  # what root owns, everybody may run
    (tmp_path / "run" / "config.toml").write_text('task = "task.py"\n')
    monkeypatch.setattr(resume, "is_own", lambda path: path.resolve() != tmp_path / foreign)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(SettingError, match="belongs to another account"):
        require_own(run, "task.py", is_built_in=False)
    require_own(run, "fashion-mnist", is_built_in=True)
    assert main(["train", "--resume", "run"]) == EXIT_USAGE
    assert not Path("code-was-run").exists()
    monkeypatch.setattr(resume, "is_own", lambda _: True)
    require_own(run, "task.py", is_built_in=False)


@pytest.mark.parametrize("key", ["num_gpus", "loader_workers"])
def test_a_file_alone_does_not_start_thousands_of_processes(key: str) -> None:
    with pytest.raises(SettingError, match=f"{key} = 100000"):
        require_few_processes({key: 100_000}, {})
    require_few_processes({key: 100_000}, {key: 100_000})
    require_few_processes({key: 8}, {})


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("dataclasses", "tomllib", "rich", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "stormo", "runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_may_not_be_looked_into_leaves_the_others_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text('{"stopped_by": "epochs", "task": "\\u001b[31mred"}')
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert main(["runs", "--runs-folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "\x1b" not in shown
