"""Every command of docs/clusters/ is of a form that some test runs, or is marked as not run; its flags exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stormo.commands import new
from stormo.submit.settings import slurm_options
from stormo.training.settings import read_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "clusters").glob("*.md"))
# How a command on a page begins, the test that runs one of that form, and the words by which it does.
RUN_BY = {
    "stormo train --launcher ssh": ("tests/system/test_ssh.py", '"--launcher", "ssh"'),
    "mpirun -n": ("tests/system/test_mpi.py", '"-n", "2"'),
    "mpirun --host": ("tests/system/test_mpi.py", '"--host"'),
    "mpiexec -hosts": ("tests/system/test_mpi.py", '"-hosts"'),
    "stormo doctor --num-nodes": ("tests/system/test_preflight.py", '"--num-nodes", "3"'),
    "stormo doctor": ("tests/doctor/test_command.py", '"doctor"'),
    "stormo train --num-gpus 2 --preflight": ("tests/system/test_preflight.py", '"--num-gpus", "2", "--preflight"'),
    "stormo train --num-gpus 4 --max-restarts": ("tests/system/test_restarts.py", '"--max-restarts"'),
    "export TORCH_DISABLE_SHARE_RDZV": (
        "tests/system/test_restarts.py",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    ),
    "torchrun --nnodes 1:4": ("tests/system/test_restarts.py", '"--nnodes", "1:2"'),
    "salloc": ("tests/system/test_slurm.py", '"salloc"'),
    "srun stormo train": ("tests/system/test_slurm.py", '"srun"'),
    "stormo train --dry-run": ("tests/system/test_slurm.py", '"--dry-run"'),
    "stormo submit my_task.py --device cpu --num-gpus 2 --time": ("tests/system/test_submit.py", '"--warn-s"'),
    "stormo train --num-gpus 2 --task.width 1": ("tests/data/staging/test_training.py", '"--stage"'),
}
MARK = "not run here"
NO_TRAINING = ("pip install", "less ")


def commands(page: Path) -> list[tuple[str, bool]]:
    """The commands of a page, and whether each is marked, in its line, its heading or the paragraph beside it."""
    found = []
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"```console\n(.*?)```", text, re.DOTALL):
        before = text[: block.start()].rstrip().rpartition("\n\n")[2]
        after = text[block.end() :].lstrip().partition("\n\n")[0].partition(" runs ")[0]
        heading = re.findall(r"^## .*$", text[: block.start()], re.MULTILINE)[-1:]
        beside = " ".join([before, after[:40], *heading])
        lines = re.sub(r" \\\n\s+", " ", block[1]).splitlines()
        found += [(line[2:], MARK in line + beside) for line in lines if line.startswith("$ ")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_run_by_a_test_or_marked(page: Path) -> None:
    assert f"clusters/{page.name}" in (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    for command, is_marked in commands(page):
        if is_marked or command.startswith(NO_TRAINING):
            continue
        beginnings = [beginning for beginning in RUN_BY if command.startswith(beginning)]
        assert beginnings, f"{command}: no test is named here, and it is not marked as {MARK}"
        for beginning in beginnings:
            file, words = RUN_BY[beginning]
            assert words in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {words}"


@pytest.mark.parametrize("verb", ["train", "submit"])
def test_every_flag_on_the_pages_exists(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new.write_task("my_task.py", "classification")
    of_slurm = {option.flag for option in slurm_options()}
    num_read = 0
    for page in PAGES:
        for command, _ in commands(page):
            words = shlex.split(command, comments=True)
            if verb not in words or "stormo" not in words:
                continue
            train = words[words.index(verb) + 1 :]
            if verb == "submit":
                train = [word for word, flag in _with_flags(train) if flag not in of_slurm]
            read_settings(train)
            num_read += 1
    assert num_read >= 2


def _with_flags(words: list[str]) -> list[tuple[str, str]]:
    """Every word with the flag that it is, or is the value of."""
    flag, found = "", []
    for word in words:
        flag = word.partition("=")[0] if word.startswith("--") else flag
        found.append((word, flag))
    return found
