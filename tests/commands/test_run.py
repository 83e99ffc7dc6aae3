"""`stormo run`: a user's script on several workers, and every way in which it can end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from tests import forked, programs

SCRIPT = Path(__file__).parent.with_name("script") / "training.py"
ENDS_WITHIN_S = 240.0  # on a busy machine; what is promised is seconds
SLOW = ("--slow", "0.1", "--epochs", "1000")
NUM_EPOCHS = 10  # of four steps each: twelve seconds of slow ones, in which a signal comes
NUM_STEPS = 4 * NUM_EPOCHS


def _environ() -> dict[str, str]:
    # As a file of a user's own would be started: from another folder, with stormo installed.
    paths = [str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _start(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environ(),
        cwd=cwd,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def _run(num_workers: int, *flags: str, script: Path | str = SCRIPT, cwd: Path | None = None) -> tuple[int, str, str]:
    return _end(_start(*_words(num_workers, *flags, script=script), cwd=cwd))


def _words(num_workers: int, *flags: str, script: Path | str = SCRIPT) -> list[str]:
    return ["-m", "stormo", "run", str(script), "--num-gpus", str(num_workers), "--device", "cpu", "--", *flags]


def _pids(process: subprocess.Popen[str], count: int) -> dict[int, int]:
    """The workers' processes, by rank, once all are in their loops."""
    assert process.stdout is not None
    pids: dict[int, int] = {}
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        pids |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) has pid (\d+)", line)}
    return pids


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _digest(out: str) -> str:
    found = re.findall(r"workers: (\w{16})$", out, re.MULTILINE)
    assert len(found) == 1, out
    return str(found[0])


@pytest.fixture(scope="module")
def whole() -> str:
    """The output of two workers, of which one forks a child; the last one runs on for longer than the others linger."""
    flags = ("--epochs", str(NUM_EPOCHS), "--alone", "6", "--fail-rank", "1", "--how", "fork")
    code, out, err = _end(_start(*_words(2, *flags)))
    assert (code, err) == (0, "")
    return out


def test_a_script_runs_unchanged_with_stormo_with_torchrun_and_alone(tmp_path: Path, whole: str) -> None:
    assert "[rank 1] rank 1 has pid" in whole
    assert f"steps {NUM_STEPS} of 2 workers" in whole
    under_torchrun = programs.run([str(SCRIPT), "--epochs", str(NUM_EPOCHS)], tmp_path, num_workers=2)
    assert under_torchrun.returncode == 0, under_torchrun.stderr
    assert _digest(under_torchrun.stdout) == _digest(whole)
    code, plain, err = _end(_start(str(SCRIPT), "--num-workers", "2", cwd=tmp_path))
    assert (code, err) == (0, "")
    assert "of 1 workers" in plain


def test_a_module_is_run_by_its_name_with_its_own_flags_though_it_never_asks_for_the_world(tmp_path: Path) -> None:
    tmp_path.joinpath("mine.py").write_text(
        "import os, sys, time\ntime.sleep(2.5)\nprint(os.environ['RANK'], sys.argv[1:])\n"
    )
    # A script may prepare its data for as long as it likes: the timeout is for workers that wait for each other.
    words = ["-m", "stormo", "run", "mine", "--num-gpus", "2", "--device", "cpu", "--timeout", "1", "--"]
    code, out, err = _end(_start(*words, "--num-gpus", "7", cwd=tmp_path))
    assert code == 0
    assert sorted(out.splitlines()) == ["0 ['--num-gpus', '7']", "[rank 1] 1 ['--num-gpus', '7']"]
    assert (
        err == "stormo: no worker called stormo.World(), so that each of the 2 ran alone (a task is for stormo train)\n"
    )


ENDINGS: dict[str, tuple[int, str]] = {
    "raise": (1, "stormo: rank 1 on host {host} failed: ValueError: boom\nTraceback (most recent call last):\n"),
    "break": (2, "stormo: rank 0 is at: "),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_worker_that_fails_ends_all_and_is_named_first(how: str) -> None:
    process = _start(*_words(2, *SLOW, "--fail-rank", "1", "--how", how))
    pids = _pids(process, 2)
    code, _, err = _end(process)
    expected, words = ENDINGS[how]
    assert code == expected, err
    assert err.startswith(words.split("{host}")[0]), err
    assert words.split("{host}")[-1] in err
    assert err.count("Traceback") == (how == "raise")
    if how == "break":
        assert err.count("\n") == 1
    assert all(_is_gone(pid) for pid in pids.values())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str)
def test_a_script_that_asks_stops_in_order_and_resumes(
    tmp_path: Path, whole: str, number: signal.Signals, code: int
) -> None:
    flags = ("--epochs", str(NUM_EPOCHS), "--folder", str(tmp_path / "c"), "--looks")
    process = _start(*_words(2, "--slow", "0.3", *flags))
    pids = _pids(process, 2)
    process.send_signal(number)
    ended, out, err = _end(process)
    assert ended == code, err
    assert "Traceback" not in err
    assert re.search(r"saved at step \d+", out)
    assert all(_is_gone(pid) for pid in pids.values())
    if number is signal.SIGTERM:
        resumed = programs.run([str(SCRIPT), *flags], tmp_path, num_workers=2)
        assert resumed.returncode == 0, resumed.stderr
        assert f"steps {NUM_STEPS} of" in resumed.stdout
        assert _digest(resumed.stdout) == _digest(whole)


def test_a_script_that_does_not_ask_ends_at_once() -> None:
    process = _start(*_words(2, *SLOW))
    pids = _pids(process, 2)
    process.send_signal(signal.SIGTERM)
    ended, _, err = _end(process)
    assert ended == 75, err
    assert "was ended by SIGTERM" in err
    assert "Traceback" not in err
    assert all(_is_gone(pid) for pid in pids.values())


def test_one_process_ends_as_python_does(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # keeps the writes apart, as a pipe does not
    with ours, theirs:
        command = [sys.executable, "-u", str(SCRIPT), "--fail-rank", "0"]
        failed = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=_environ(), check=False)
        theirs.close()
        (line,) = iter(lambda: ours.recv(100), b"")
    assert re.fullmatch(rb"rank 0 has pid \d+\n", line), "lines are written whole, even without a buffer"
    assert failed.returncode == 1
    assert failed.stderr.startswith(b"Traceback (most recent call last):\n")
    assert failed.stderr.endswith(b"ValueError: boom\n")
    code, _, err = _end(_start(str(SCRIPT), "--how", "setting"))
    assert code == 2
    assert err.startswith("stormo: a str was to be reduced")
    assert err.count("\n") == 1
    program = programs.Program([str(SCRIPT), *SLOW, "--looks", "--folder", str(tmp_path / "c")], tmp_path)
    output = Path(program.path("out", 0))
    while not (output.exists() and "has pid" in output.read_text()):
        time.sleep(0.05)
    os.kill(program.processes[0].pid, signal.SIGUSR1)
    done = program.wait()
    assert (done.returncode, done.stderr) == (75, "")
    assert "saved at step" in done.stdout


def test_a_syntax_error_is_shown_once_with_its_line(tmp_path: Path) -> None:
    tmp_path.joinpath("broken.py").write_text("import stormo\nworld = stormo.World(\n")
    code, _, err = _run(2, script=tmp_path / "broken.py")
    assert code == 1
    assert re.match(r"stormo: rank [01] on host \S+ ended with exit code 1 and did not report why\n", err)
    assert "SyntaxError: '(' was never closed" in err


def test_a_loading_process_that_runs_the_script_again_is_reported(tmp_path: Path) -> None:
    tmp_path.joinpath("spawns.py").write_text(
        "import torch, stormo\nfrom torch.utils.data import DataLoader\nworld = stormo.World()\n"
        "data = DataLoader(range(8), 2, num_workers=1, multiprocessing_context='spawn')\n"
        "for batch in world.loader(data):\n    pass\n"
    )
    code, _, err = _end(_start(str(tmp_path / "spawns.py")))
    assert code != 0
    assert 'put all but definitions under if __name__ == "__main__":.' in err


SENTENCES: dict[tuple[str, ...], str] = {
    (): "stormo run was given no script, but there is nothing to run; name one: stormo run train.py.",
    ("",): "stormo run was given no script, but there is nothing to run; name one: stormo run train.py.",
    ("folder",): "stormo run folder was typed, but that folder has no __main__.py to run; name a file that ends in .py",
    ("s.py", "--num-gpus", "99999999", "--device", "cpu"): "for which so many processes would wait in turn; set --num-",
    ("none.py",): "stormo run none.py was typed, but there is no such file; check the path.",
    ("none_such_module",): "stormo run none_such_module was typed, but there is no such module",
    ("s.txt",): "stormo run s.txt was typed, but s is a module that holds no others; name s.py.",
    ("there.txt",): "stormo run there.txt was typed, but it is no Python file; name a file that ends in .py, or a mod",
    ("-m", "s"): "-m was set, but a module needs no flag; leave it out: stormo run s.",
    ("s.py", "--mesh", "shard=2"): "--mesh was set, but stormo run does not change the model of a script; leave it ",
    ("s.py", "--zero=1"): "--zero=1 was set, but stormo run does not change the model of a script; leave it out, or ",
    ("s.py", "--max-restarts", "1"): "--max-restarts 1 was set, but stormo run starts a script once",
}


@pytest.mark.parametrize("words", SENTENCES, ids=str)
def test_what_cannot_be_run_is_refused_before_a_worker_starts(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    tmp_path.joinpath("s.py").write_text("raise AssertionError('it was run')\n")
    tmp_path.joinpath("there.txt").write_text("no program\n")
    tmp_path.joinpath("folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    assert SENTENCES[words] in capsys.readouterr().err


def test_flags_of_the_script_without_the_dashes_are_explained(capsys: pytest.CaptureFixture[Any]) -> None:
    assert main(["run", str(SCRIPT), "--epochs", "3"]) == 2
    assert "--epochs" in (said := capsys.readouterr().err)
    assert "put the script's own flags after --, as in: stormo run train.py -- --epochs" in said
