"""The script of a job: its whole text, and what bash makes of it where srun and scontrol are small fakes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stormo.submit.script import Job, render
from stormo.submit.settings import Slurm
from tests.golden import check_golden
from tests.system.hosts import wait_until

GOLDEN = Path(__file__).parent / "golden"
PLAIN = Job(
    name="demo",
    slurm=Slurm(time="02:00:00"),
    setup="",
    least_nodes=4,
    most_nodes=4,
    workers_per_node=8,
    gpus_per_node=8,
    folder=Path("/home/ada/work"),
    runs_folder=Path("/home/ada/work/runs"),
    python="/home/ada/venv/bin/python",
    arguments=("my_task.py", "--num-gpus", "8", "--num-nodes", "4", "--epochs", "90"),
)
JOBS = {
    "plain": PLAIN,
    "full": replace(
        PLAIN,
        least_nodes=1,
        arguments=("my_task.py", "--num-gpus", "8"),
        slurm=Slurm(
            time="1-00",
            partition="gpu,long",
            account="physics",
            qos="normal",
            constraint="a100",
            reservation="course",
            nodelist="n[1-4]",
            exclude="n2",
            mem="0",
            cpus_per_task=8,
            exclusive=True,
            job_name="ada's run",
            log="out/50 %.txt",
            warn_s=300,
            sbatch="--mail-type=END --comment='two words'",
        ),
        setup="module load cuda\nsource env.sh",
    ),
    "apptainer": replace(
        PLAIN,
        runs_folder=Path("/scratch/runs"),
        slurm=Slurm(
            apptainer="torch.sif", apptainer_bind="/data:/mnt", on_time_limit="stop", sbatch="--gres=gpu:a100:8"
        ),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_whole_text(name: str) -> None:
    check_golden(GOLDEN / f"{name}.sh", render(JOBS[name]))


def test_every_script_is_bash_and_no_other_golden_file_is_there() -> None:
    for path in GOLDEN.iterdir():
        assert path.stem in JOBS
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_the_page_shows_the_script() -> None:
    page = Path(__file__).parents[2] / "docs" / "clusters" / "slurm.md"
    assert f"```bash\n{render(replace(PLAIN, slurm=Slurm(time='02:00:00', partition='gpu')))}```" in page.read_text(
        encoding="utf-8"
    )


class Node:
    """Runs a script in a folder with commands that stand in for Slurm's and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        (folder / "bin").mkdir()
        self.fake("scontrol", "true")

    def fake(self, name: str, body: str) -> None:
        """Put a command there."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/bash\nprintf "%s" {name} >> {self.calls}\nprintf " %q" "$@" >> {self.calls}\n')
        with path.open("a") as file:
            file.write(f"echo >> {self.calls}\n{body}\n")
        path.chmod(0o755)

    def job(self, **changed: object) -> Job:
        """A job that runs here."""
        at = {"folder": self.folder, "runs_folder": self.folder / "runs", "python": "python"}
        job = replace(PLAIN, **{**at, **changed})  # type: ignore[arg-type]
        (job.run_folder / "checkpoints").mkdir(parents=True)
        return job

    def start(self, job: Job) -> subprocess.Popen[bytes]:
        """Start the script as Slurm would."""
        script = self.folder / "job.sh"
        script.write_text(render(job), encoding="utf-8")
        told = {
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }
        return subprocess.Popen(["bash", str(script)], env={**os.environ, **told}, cwd=self.folder)

    def called(self) -> list[list[str]]:
        """Every call so far."""
        return [shlex.split(line) for line in self.calls.read_text().splitlines()]

    def notes(self) -> list[str]:
        """What the script has noted, without the time."""
        lines = (self.folder / "runs" / "demo" / "slurm-attempts.txt").read_text().splitlines()
        return [" ".join([line.split(" ")[0], *line.split(" ")[2:]]) for line in lines]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


DEAF = ("bash", "-c", 'trap "" USR1; exec "$@"', "-")  # what a task of srun begins with
SAVES = "mkdir -p runs/demo/checkpoints/step-00000007"
# A shell cannot listen to a signal that it was started deaf to; srun and Python can.
LISTENS = """
import os, pathlib, signal, subprocess, sys, time
def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)  # as stormo does: an interpreter that ends would be killed by the next one
    subprocess.run(sys.argv[1], shell=True, check=True)
    sys.exit(75)
pathlib.Path("started").touch()
while sys.argv[2] == "late" and not pathlib.Path("warned").exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
pathlib.Path("ready").touch()
while True:
    time.sleep(0.01)
"""


DONE = """echo '"stopped_by": "epochs"' > runs/demo/summary.json"""


def _listens(then: str, when: str = "at once") -> str:
    """A command that runs until it is warned, does something, and ends with 75."""
    return f"exec {sys.executable} -c {shlex.quote(LISTENS)} {shlex.quote(then)} {shlex.quote(when)}"


def _warned(node: Node, job: Job, then: str = SAVES) -> int:
    """Warn a job once its training runs; the exit code of the job."""
    node.fake("srun", _listens(then))
    process = node.start(job)
    wait_until((node.folder / "ready").exists, 60.0, "the training did not start")
    process.send_signal(signal.SIGUSR1)
    return process.wait(60.0)


def test_after_the_warning_the_job_is_queued_again(node: Node) -> None:
    assert _warned(node, node.job()) == 75
    assert node.called()[1:] == [["scontrol", "requeue", "12"]]
    assert node.notes() == ["12 start n[1-4]", "12 end 75", "12 requeue"]


def test_a_warning_that_comes_before_the_training_listens_is_given_again(node: Node) -> None:
    node.fake("srun", _listens(SAVES, "late"))
    node.fake("sleep", "/bin/sleep 0.05")  # between two warnings
    process = node.start(node.job())
    wait_until((node.folder / "started").exists, 60.0, "the training did not start")
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: ["sleep", "5"] in node.called(), 60.0, "no warning was given")
    (node.folder / "warned").touch()
    assert process.wait(60.0) == 75
    assert ["scontrol", "requeue", "12"] in node.called()


def test_a_warning_during_the_setup_is_kept_and_what_the_setup_sets_does_no_harm(node: Node) -> None:
    node.fake("srun", _listens(SAVES))
    node.fake("sleep", "/bin/sleep 0.05")
    setup = "set -e\ntouch here\nwhile [ ! -e warned ]; do /bin/sleep 0.05; done"
    process = node.start(node.job(setup=setup))
    wait_until((node.folder / "here").exists, 60.0, "the setup did not start")
    process.send_signal(signal.SIGUSR1)
    (node.folder / "warned").touch()
    assert process.wait(60.0) == 75
    assert node.notes() == ["12 start n[1-4]", "12 end 75", "12 requeue"]


def test_where_slurm_does_not_requeue_it_the_log_says_how_to_resume(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.fake("scontrol", "exit 1")
    assert _warned(node, node.job()) == 75
    assert "--run-name demo --resume" in capfd.readouterr().err


def test_an_attempt_without_a_step_is_the_last(node: Node) -> None:
    assert _warned(node, node.job(), then="true") == 75
    assert [call[0] for call in node.called()] == ["srun"]


def test_with_stop_the_warning_is_the_end(node: Node) -> None:
    assert _warned(node, node.job(slurm=Slurm(on_time_limit="stop"))) == 75
    assert [call[0] for call in node.called()] == ["srun"]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_an_end_without_a_warning_is_the_end_of_the_job(node: Node, code: int) -> None:
    node.fake("srun", f"{SAVES}; {DONE}; exit {code}")
    assert node.start(node.job()).wait(60.0) == code
    assert [call[0] for call in node.called()] == ["srun"]
    assert node.notes() == ["12 start n[1-4]", f"12 end {code}"]


def test_srun_that_ends_before_the_training_has_not_done_it(node: Node) -> None:
    node.fake("srun", SAVES)
    assert node.start(node.job()).wait(60.0) == 1
    assert node.notes() == ["12 start n[1-4]", "12 end 1"]


def test_a_job_that_is_cancelled_is_not_queued_again(node: Node) -> None:
    node.fake("srun", _listens(SAVES))
    process = node.start(node.job())
    wait_until((node.folder / "ready").exists, 60.0, "the training did not start")
    step = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, check=True).stdout.split()[0])
    process.terminate()
    os.kill(step, signal.SIGTERM)  # Slurm signals all of them
    assert process.wait(60.0) == -signal.SIGTERM
    wait_until((node.folder / "runs/demo/checkpoints/step-00000007").exists, 60.0, "the training did not save")
    assert [call[0] for call in node.called()] == ["srun"]


def test_every_word_reaches_the_training_as_it_was_typed(node: Node) -> None:
    odd = ["--task.a", 'it\'s "quoted" $HOME `x` \\n', "--task.b=-1", "--task.c", "ß 5 %\nsecond line", "--no-compile"]
    node.fake("srun", DONE)
    assert node.start(node.job(arguments=("my task.py", *odd))).wait(60.0) == 0
    text = node.calls.read_text()
    seen = (
        subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True)
        .stdout.decode()
        .split("\0")[:-1]
    )
    assert seen == [
        "srun",
        *DEAF,
        "python",
        "-P",
        "-m",
        "stormo",
        "train",
        "my task.py",
        *odd,
        "--run-name",
        "demo",
        "--resume",
    ]


def test_an_image_gets_the_command_and_sees_the_folders(node: Node) -> None:
    node.fake("srun", 'exec "$@"')
    node.fake("apptainer", DONE.replace("runs/demo", "out/runs/demo"))
    (node.folder / "out").mkdir()
    job = node.job(
        slurm=JOBS["apptainer"].slurm, runs_folder=node.folder / "out" / "runs", arguments=("fashion-mnist",)
    )
    assert node.start(job).wait(60.0) == 0
    folder = str(node.folder)
    assert node.called()[1] == [
        *("apptainer", "exec", "--nv", "--bind", f"{folder},{folder}/out/runs,/data:/mnt", f"{folder}/torch.sif"),
        *("stormo", "train", "fashion-mnist", "--run-name", "demo", "--resume"),
    ]
