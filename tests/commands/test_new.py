"""`stormo new` writes a task that trains at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.commands.new import KINDS

# What two epochs reach at least; the targets of the made-up data allow an accuracy of 1, a squared error of 0.01 and
# about 0.31 nats a byte.
REACHED = {
    "classification": lambda result: result["validation_accuracy"] > 0.9,
    "regression": lambda result: result["validation_loss"] < 0.1,
    "language-model": lambda result: result["validation_loss"] < 2.0,
}


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_task", None)


def _summary(folder: Path, run: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "runs" / run / "summary.json").read_text(encoding="utf-8"))
    return loaded


def test_every_kind_is_tested() -> None:
    assert REACHED.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_short_and_clean_and_trains_unchanged(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "my_task.py", "--kind", kind]) == 0
    assert "stormo train my_task.py" in capfd.readouterr().out
    assert len((tmp_path / "my_task.py").read_text(encoding="utf-8").splitlines()) < 80
    ruff = [sys.executable, "-m", "ruff"]
    where = ["--config", str(Path(__file__).parents[2] / "pyproject.toml"), "my_task.py"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    with pytest.raises(SystemExit) as ended:
        main(["train", "my_task.py", "--help"])
    assert ended.value.code == 0
    assert "--task.width N                " in capfd.readouterr().out
    settings = ["--device", "cpu", "--epochs", "2", "--no-tensorboard", "--run-name", "one"]
    assert main(["train", "my_task.py", *settings]) == 0
    assert capfd.readouterr().err == ""
    result = _summary(tmp_path, "one")
    assert result["epochs_run"] == 2
    assert REACHED[kind](result), result


def test_the_kind_is_classification_unless_another_is_named(tmp_path: Path) -> None:
    assert main(["new", "my_task.py"]) == 0
    assert "class Classification(stormo.Task)" in (tmp_path / "my_task.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["there.py"], "the file there.py was named, but it is there already; name another one."),
        (["my_task"], "the file my_task was named, but a task is a Python file; name it my_task.py."),
        (["--", "-my.py"], "the file -my.py was named, but it would be taken for a flag; name it my.py."),
        (["my_task.txt"], "the file my_task.txt was named, but a task is a Python file; name it my_task.py."),
        ([".py"], "the file .py was named, but a task is a Python file; name it my_task.py."),
        ([""], "an empty name was given, but a task is a Python file; name one, such as my_task.py."),
        (["."], "the folder . was named, but a task is a Python file; name one, such as my_task.py."),
        ([".."], "the folder .. was named, but a task is a Python file; name one, such as ../my_task.py."),
        (
            ["random.py"],
            "the task random.py was named, but random is also the name of a module it would hide; rename the file.",
        ),
        (
            ["absent/my_task.py"],
            "the file absent/my_task.py was named, but it cannot be written (No such file or directory); make its "
            "folder, or name another.",
        ),
        (
            ["my_task.py", "--kind", "clasification"],
            "--kind 'clasification' was asked for, but there is none of that name; did you mean classification? choose "
            "one of: classification, language-model, regression.",
        ),
        ([], "the following arguments are required: FILE.py; see stormo new --help."),
    ],
)
def test_what_cannot_be_written_is_refused(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.py").write_text("mine\n", encoding="utf-8")
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err == f"stormo: {sentence}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text(encoding="utf-8") == "mine\n"


def test_a_name_with_a_space_is_quoted_in_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "my task.py"])
    assert "  stormo train 'my task.py'                 train it" in capsys.readouterr().out


def test_a_file_that_finds_no_room_is_not_left_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code = main(["new", "my_task.py"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert "the file my_task.py was named, but it cannot be written (File too large)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
