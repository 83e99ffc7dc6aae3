"""The command itself: verbs, version, errors as one sentence, and readers that go away."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import stormo
from stormo import cli
from stormo.cli import main
from stormo.errors import MissingPackageError, SettingError, StormoError, unknown_name


def _without_reader(*arguments: str, unbuffered: bool) -> subprocess.CompletedProcess[str]:
    """Run the command with a standard output that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environ |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    command = [sys.executable, "-m", "stormo", *arguments]
    try:
        return subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    finally:
        os.close(writing)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_help_names_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: stormo VERB ...\n")
    for verb in cli._VERBS:
        assert f"  stormo {verb} " in output


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_versions_are_those_of_the_packages(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    torch = metadata.version("torch")
    assert (
        capsys.readouterr().out == f"stormo {stormo.__version__}, torch {torch}, Python {platform.python_version()}\n"
    )


def test_an_unknown_verb_names_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "stormo: verb 'trian' was asked for, but there is none of that name; did you mean train? choose one of: "
    )
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("verb", sorted(cli._VERBS))
def test_every_verb_has_its_own_help_and_refuses_what_it_does_not_know(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"usage: stormo {verb}" in capsys.readouterr().out
    assert main([verb, "--no-such-option"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stormo: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StormoError("it failed."), 1, "stormo: it failed.\n"),
        (SettingError("a was set", "b", "set c"), 2, "stormo: a was set, but b; set c.\n"),
        (
            MissingPackageError("pack", "this", "all"),
            2,
            "stormo: this needs the package pack, which is not installed; "
            "install it with: pip install 'stormo[all]'.\n",
        ),
        (
            unknown_name("thing", "x", ["b", "a"]),
            2,
            "stormo: thing 'x' was asked for, but there is none of that name; choose one of: a, b.\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setitem(cli._VERBS, "train", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err == text


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setitem(cli._VERBS, "train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize(
    "unbuffered",
    [
        True,
        False,
    ],
)
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--dry-run", "--device", "cpu"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str], unbuffered: bool) -> None:
    done = _without_reader(*arguments, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["--help", "runs", "train --dry-run --device cpu"])
def test_closed_streams_are_no_error(verb: str, tmp_path: Path) -> None:
    command = f"exec '{sys.executable}' -m stormo {verb} <&- >&- 2>&-"
    environ = os.environ | {"PYTHONPATH": str(Path(stormo.__file__).parents[1])}
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, check=False).returncode == 0


def test_what_is_printed_reaches_no_file_that_took_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom stormo import cli\n"
        "def verb(arguments):\n    with open('file', 'w') as file:\n        print('printed', flush=True)\n"
        "        print('complained', file=sys.stderr, flush=True)\n        file.write('own')\n    return 0\n"
        "cli._VERBS['train'] = verb\nsys.exit(cli.main(['train']))\n"
    )
    command = f"exec '{sys.executable}' -c \"$PROGRAM\" <&- >&- 2>&-"
    environ = os.environ | {"PYTHONPATH": str(Path(stormo.__file__).parents[1]), "PROGRAM": program}
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, check=False).returncode == 0
    assert tmp_path.joinpath("file").read_text() == "own"


def test_the_flag_of_torch_distributed_launch_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for flag in ("--local-rank=1", "--local_rank=1"):
        assert main([flag, "--version"]) == 0
        assert capsys.readouterr().out.startswith("stormo ")
    assert main(["--local-rank=0", "--version"]) == 2  # which the environment does not say


@pytest.mark.parametrize(
    "arguments", [["--help"], ["runs"], ["monitor", "--once"], ["train", "--dry-run"]], ids=" ".join
)
def test_a_full_disk_behind_the_output_is_shown_in_one_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(arguments) == 1
    said = (
        "stormo: the output or the run folder cannot be written (No space left on device); make room, then start again"
    )
    assert capsys.readouterr().err.startswith(said)


def test_a_training_that_is_asked_to_stop_while_its_task_is_imported_may_resume_later(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text('import pathlib, time\npathlib.Path("there").touch()\ntime.sleep(240)\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "stormo", "train", "slow.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "there").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.count("\n")) == (75, 1)
    assert "stopped by SIGTERM before training began" in err
