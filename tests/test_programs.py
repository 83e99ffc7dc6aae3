"""Programs in forked processes end, print and fail as they would in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs

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
