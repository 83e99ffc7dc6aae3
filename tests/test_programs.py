"""Programs in forked processes start others, end, print and fail as they would in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked, programs

SCRIPT = """\
import atexit, os, sys, time
atexit.register(print, "left")
print("rank", os.environ.get("RANK"), sys.argv, __name__, os.getcwd() == os.path.dirname(os.path.abspath(__file__)))
if os.environ.get("RANK") == os.environ.get("FAILS"):
    raise ValueError("boom")
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


def test_a_program_has_its_words_its_place_and_its_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    done = programs.run(["mine.py", "0"], tmp_path, FAILS="none")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "rank None ['mine.py', '0'] __main__ True\nleft\n"
    done = programs.run(["mine.py", "0"], tmp_path, 2, FAILS="1")
    assert done.returncode == 3  # of the first rank; the second ends with 1
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: boom" in done.stderr
    assert done.stdout.count("rank ") == done.stdout.count("left") == 2


def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"did not end within 0\.5 s"):
        programs.Program(["mine.py", "60"], tmp_path, FAILS="none").wait(0.5)


PARENT = """\
import json, os, signal, subprocess, sys, tempfile
import child, torch
mine = tempfile.TemporaryDirectory(dir=".", prefix="parents-")
child.SEEN.append("by the parent")
signal.signal(signal.SIGTERM, lambda *_: None)
child_fd, ours = os.pipe()
os.write(ours, b"passed")
os.close(ours)
words = [sys.executable, "child.py", str(child_fd)]
done = subprocess.run(words, pass_fds=[child_fd], env=dict(os.environ, MINE="1"), stdout=subprocess.PIPE)
assert os.path.isdir(mine.name)
print(json.loads(done.stdout), done.returncode, subprocess.run([sys.executable, "child.py"]).returncode)
print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, __name__); sys.exit('why')", "x"]).returncode)
"""
CHILD = """\
import json, os, signal, sys, tempfile
SEEN = []
if __name__ == "__main__":
    import child
    mine = tempfile.TemporaryDirectory(dir=".")
    if len(sys.argv) == 1:
        mine.cleanup()
        os.kill(os.getpid(), signal.SIGTERM)
    read = os.read(int(sys.argv[1]), 9).decode()
    print(json.dumps([child.SEEN, read, os.environ["MINE"], "torch" in sys.modules, sys.argv[0]]))
"""


@pytest.mark.parametrize("popen", [forked.Popen, subprocess.Popen])
def test_a_program_starts_programs_that_know_nothing_of_it(tmp_path: Path, popen: type[subprocess.Popen[str]]) -> None:
    """But torch, which a fork has."""
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    pipe = subprocess.PIPE
    with popen([sys.executable, "-u", "parent.py"], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as started:
        out, err = started.communicate(timeout=60)
    assert out.splitlines() == [
        f"[[], 'passed', '1', {popen is forked.Popen}, 'child.py'] 0 {-signal.SIGTERM}",
        "['-c', 'x'] __main__",
        "1",
    ]
    assert (err, started.returncode) == ("why\n", 0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != "_") == ["child.py", "parent.py"]
