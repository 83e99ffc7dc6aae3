"""Every command of the pages has flags that exist, and every training can be planned."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.commands import new
from stormo.study.study import read_arguments, read_study
from stormo.submit.settings import slurm_options
from tests.docs.pages import DOCS, PAGES, ROOT, commands

# Each command of docs/clusters/ is of a form that a system test runs (how it begins: the test, and its words) or is
# marked as not run.
CLUSTERS = sorted((DOCS / "clusters").glob("*.md"))
RUN_BY = {
    "stormo train --launcher ssh": ("tests/system/test_ssh.py", '"--launcher", "ssh"'),
    "mpirun -n": ("tests/system/test_mpi.py", '"-n", "2"'),
    "mpirun --host": ("tests/system/test_mpi.py", '"--host"'),
    "mpiexec -hosts": ("tests/system/test_mpi.py", '"-hosts"'),
    "stormo doctor --num-nodes": ("tests/system/test_preflight.py", '"--num-nodes", "3"'),
    "stormo doctor": ("tests/doctor/test_command.py", '"doctor"'),
    "stormo train --num-gpus 2 --preflight": ("tests/system/test_preflight.py", '"--num-gpus", "2", "--preflight"'),
    "stormo train --num-gpus 4 --max-restarts": ("tests/system/test_restarts.py", '"--max-restarts"'),
    "export TORCH_DISABLE_SHARE_RDZV": ("tests/system/test_restarts.py", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    "torchrun --nnodes 1:4": ("tests/system/test_restarts.py", '"--nnodes", "1:2"'),
    "salloc": ("tests/system/test_slurm.py", '"salloc"'),
    "srun stormo train": ("tests/system/test_slurm.py", '"srun"'),
    "stormo train --dry-run": ("tests/system/test_slurm.py", '"--dry-run"'),
    "stormo submit my_task.py --device cpu --num-gpus 2 --time": ("tests/system/test_submit.py", '"--warn-s"'),
    "stormo train --num-gpus 2 --task.width 1": ("tests/data/staging/test_training.py", '"--stage"'),
}
# A training that needs a run, a file, hosts, a port or a GPU; the tasks of pages are trained by other tests.
NOT_PLANNED = {
    *("--resume", "--config", "--launcher", "--prometheus", "--mlflow", "--wandb", "--sinks", "--stage"),
    *("fit.py", "circles.py", "sentences.py", "finetune.py", "points_gan.py", "nccl"),
}


def _words(page: Path) -> list[list[str]]:
    """The words of every stormo command of a page, without what the shell reads."""
    lines = [re.split(r" [|&>]|;", command.text)[0] for command in commands(page) if "stormo " in command.text]
    found = [shlex.split(line, comments=True) for line in lines if not line.startswith("cp ")]
    return [words[words.index("stormo") + 1 :] for words in found if words[-1] != "stormo"]


@pytest.fixture(autouse=True)
def _folder_with_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    new.write_task("my_task.py", "classification")


def test_every_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for verb, *words in (words for page in PAGES for words in _words(page)):
        for one in {verb, "train", "run"} - helps.keys():
            with contextlib.suppress(SystemExit):
                main([one, "--help", "all"])
            helps[one] = capsys.readouterr().out
        also = "train" if verb in ("submit", "scale", "predict") else "run" if verb == "doctor" else verb
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            is_known = re.search(rf"{flag}\b", helps[verb] + helps[also])
            assert not word.startswith("--") or word.startswith("--task.") or is_known, f"stormo {verb} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_training_can_be_planned(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_slurm = {option.flag for option in slurm_options()}
    for verb, *given in _words(page):
        words = [word for word, flag in _with_flags(given) if verb != "submit" or flag not in of_slurm]
        if verb in ("train", "submit") and not NOT_PLANNED & {*words}:
            device = [] if "--device" in words else ["--device", "cpu"]
            assert main(["train", *words, *device, "--dry-run"]) == 0, capsys.readouterr().err
        if verb == "scale" and "--from" not in words:
            assert len(read_study(*read_arguments(words)).workers) > 1


def _with_flags(words: list[str]) -> list[tuple[str, str]]:
    """Every word with the flag that it is, or is the value of."""
    flag, found = "", []
    for word in words:
        flag = word.partition("=")[0] if word.startswith("--") else flag
        found.append((word, flag))
    return found


@pytest.mark.parametrize("page", CLUSTERS, ids=lambda page: page.stem)
def test_every_command_for_clusters_is_run_by_a_test_or_marked(page: Path) -> None:
    for command in commands(page):
        if "not run here" in command.text + command.around or command.text.startswith(("pip install", "less ")):
            continue
        beginnings = [beginning for beginning in RUN_BY if command.text.startswith(beginning)]
        assert beginnings, f"{command.text}: no test is named here, and it is not marked as not run here"
        for beginning in beginnings:
            file, words = RUN_BY[beginning]
            assert words in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {words}"
