"""The verb `submit` where Slurm's commands are small fakes that answer what they are told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.config import options
from stormo.submit import sbatch
from stormo.submit.settings import Slurm, seconds_of, slurm_options
from stormo.system.files import BadFileError

TASK = str(Path(__file__).parents[1] / "system" / "task.py")


class FakeSlurm:
    """A folder of commands that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.calls = folder / "calls"
        self.says("sbatch", "12")
        self.says("sinfo", "main")
        self.says("squeue", "", "slurm_load_jobs error: Invalid job id specified", 1)

    def says(self, name: str, text: str, error: str = "", code: int = 0) -> None:
        """Let a command print something and end."""
        (self.folder / f"{name}.out").write_text(text)
        (self.folder / f"{name}.err").write_text(error)
        at = self.folder / name
        at.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\ncat {at}.out\ncat {at}.err >&2\nexit {code}\n')
        at.chmod(0o755)

    def called(self) -> list[str]:
        """Every call so far."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return made


def _submit(*words: str) -> int:
    return main(["submit", TASK, "--device", "cpu", "--run-name", "one", *words])


def _files(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _record() -> dict[str, object]:
    return dict(json.loads(Path("runs/one/slurm.json").read_text()))


def test_a_submitted_run_has_its_script_and_its_job_and_has_not_begun(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit("--num-gpus", "2") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"job 12: run one in {tmp_path}/runs/one\n")
    for words in (f"tail -F {tmp_path}/runs/one/slurm.log", "squeue --jobs=12", "scancel 12"):
        assert words in said
    assert slurm.called() == [f"sbatch --parsable {tmp_path}/runs/one/job.sh"]
    assert "#SBATCH --ntasks-per-node=2\n" in Path("runs/one/job.sh").read_text()
    assert _record()["job_id"] == "12"
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.startswith("No run in runs")
    assert main(["show", "one"]) == 2
    assert "has not begun" in capsys.readouterr().err


def test_a_run_whose_job_waits_or_runs_is_not_given_a_second_one(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit() == 0
    slurm.says("squeue", "PENDING\n")
    assert _submit() == 2
    assert "job 12 carries it already (pending)" in capsys.readouterr().err
    assert "squeue --noheader --jobs=12 --format=%T" in slurm.called()
    for end in (("", "", 0), ("", "slurm_load_jobs error: Invalid job id specified", 1)):
        slurm.says("squeue", *end)
        slurm.says("sbatch", "13")
        assert _submit("--resume") == 0
    assert _record()["job_id"] == "13"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("job_id", ["1 2", "--help", "12;x", "", "12_", "١٢"])
def test_the_number_of_a_job_goes_to_slurm_only_if_it_is_one(job_id: str) -> None:
    assert _submit() == 0
    assert sbatch.read_job_id(Path("runs/one")) == "12"
    for record in ({"job_id": job_id}, {"job_id": 12}, {}):
        Path("runs/one/slurm.json").write_text(json.dumps(record))
        with pytest.raises(BadFileError):
            sbatch.read_job_id(Path("runs/one"))


@pytest.mark.parametrize(
    "words",
    [
        *(["submit", TASK, "--device", "cpu", flag] for flag in ("--no-follow", "--sweep=seed=0,1", "--array")),
        ["submit", TASK, "--device", "cpu", "--on-time-limit", "chain"],
        ["submit", TASK, "--device", "cpu", "--config", "old.toml"],
        *(["status"], ["cancel", "one"]),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(
    words: list[str], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.toml").write_text('[slurm]\narray = "0-3"\n')
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "was asked for, but there is none of that name; " in error
    assert error.count("\n") == 1
    assert slurm.called() == []


def test_print_shows_the_script_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    Path("a.toml").write_text('[slurm]\ntime = "10:00"\npartition = "gpu"\n[stop]\nepochs = 7\n')
    assert _submit("--config", "a.toml", "--partition", "long", "--setup", "one", "--setup=two", "--print") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --time=10:00\n#SBATCH --partition=long\n" in script
    assert "\none\ntwo\n" in script
    assert " --epochs 7 \\\n        --run-name " in script
    assert "a.toml" not in script  # it may be changed before the job starts
    assert _files() == ["a.toml"]
    assert _submit() == 2
    assert capsys.readouterr().err == (
        "stormo: a job was to be submitted to Slurm, but this machine has no sbatch; "
        "submit on a login node of the cluster; --print shows the script anywhere.\n"
    )
    assert _files() == ["a.toml"]


@pytest.mark.usefixtures("slurm")
def test_what_a_repeated_flag_says_is_joined(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.sif").touch()
    words = ["--apptainer=a.sif", "--apptainer-bind", "/a", "--apptainer_bind=/b:/c", "--setup", "one", "--setup=two"]
    assert _submit(*words, "--sbatch", "--nice=3 --comment='a b'", "--sbatch", "--hold", "--sbatch", "", "--print") == 0
    script = capsys.readouterr().out
    assert f"--bind {Path.cwd()},{Path.cwd()}/runs,/a,/b:/c a.sif" in script.replace(f"{Path.cwd()}/a.sif", "a.sif")
    assert "\none\ntwo\n" in script
    assert '#SBATCH --nice=3\n#SBATCH --comment="a b"\n#SBATCH --hold\n' in script


_WITH_SECRET = """\
from dataclasses import dataclass
from stormo.config import option
from tests.system.task import Options, Tiny

@dataclass(frozen=True, kw_only=True)
class Options(Options):
    hub_token: str = option("", "of the hub")

class Mine(Tiny):
    Options = Options
"""


def test_a_secret_is_not_written_to_the_script(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(_WITH_SECRET)
    Path("a.toml").write_text('[task_options]\nhub_token = "hf_mine"\n')
    command = ["submit", "mine.py", "--device", "cpu"]
    for words in (["--task.hub-token", "hf_mine"], ["--config", "a.toml"]):
        assert main([*command, *words]) == 2
        assert capsys.readouterr().err == (
            "stormo: --task.hub-token was set for a job that is submitted, but secrets are not written to files, and "
            "the script of the job would hold it; set it empty (--task.hub-token=), and let the task read it from a "
            "file or an environment variable.\n"
        )
    assert slurm.called() == []
    assert _files() == ["a.toml", "bin", "mine.py"]
    assert main([*command, "--task.hub-token=", "--print"]) == 0


def test_every_setting_that_is_given_is_told_to_the_training_and_nothing_else(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--no-tensorboard", "--base-lr", "1e-3", "--task.pass-s", "-0.5", "--grow_batch", "2:2x", "--clip-norm=1"]
    assert _submit(*words, "--print") == 0
    script = capsys.readouterr().out
    command = script[script.index(TASK) : script.index(" --run-name")].replace("\\\n", "")
    assert command.split() == [
        *(TASK, "--device", "cpu", "--grow-batch", "2:2x", "--base-lr", "0.001", "--clip-norm", "1.0"),
        *("--no-tensorboard", "--task.pass-s=-0.5"),
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--time", "two hours"], "--time two hours was set, but it is no time that Slurm reads"),
        (["--time", "1", "--warn-s", "90"], "the limit of 60 s leaves no time before a warning 90 s ahead of it"),
        (["--mem", "64GB"], "--mem 64GB was set, but it is no size that Slurm reads"),
        (["--node-id", "0"], "--node-id was set for a job that is submitted, but Slurm numbers the nodes"),
        (["--master-addr", "n1"], "but Slurm says where the first node is; leave --master-addr out"),
        (["--device", "auto"], "no --num-gpus was set for a job that is submitted"),
        (["--num-gpus", "2", "--mesh", "shard=3"], "3"),
        (["--global-batch-size", "0"], "a global batch of 0 was set"),
        (["--apptainer", "no.sif"], "--apptainer no.sif was set, but there is no such file"),
        (["--apptainer-bind", "/data"], "--apptainer-bind /data was set, but there is no image that could see it"),
        (["--sbatch", "--nodes=3"], "--nodes is set by --num-nodes"),
        (["--sbatch", "--comment='a\"b'"], "but a line of an sbatch script holds no such text; leave out line ends"),
        (["--sbatch", "--comment='a\n#SBATCH --mem=1'"], "but a line of an sbatch script holds no such text; leave"),
        (["--sbatch", "'--a\nb'"], "but a line of an sbatch script holds no such text; leave out line ends"),
        (["--sbatch"], "argument --sbatch: expected one argument"),
        (["--setup-file", "bin"], "--setup-file bin was set, but it cannot be read (Is a directory); name a file of"),
        (["--setup-file", sys.executable], "was set, but it cannot be read (it is no text in UTF-8); name a file of"),
        (["--log", "bin"], "--log bin was set, but that is a folder; name a file in it"),
        (["--log", "no/where.txt"], "--log no/where.txt was set, but there is no such folder"),
        (["--partition", 'a"b'], "--partition was set to 'a\"b'"),
        (["--dry-run"], "--dry-run was set for a job that is submitted"),
        (["--run-name", "a/b"], "--run-name 'a/b' was set"),
        (["--run-name=-a"], "--run-name '-a' was set"),
    ],
)
def test_what_cannot_hold_is_refused_before_slurm_is_asked(
    words: list[str], sentence: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit(*words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert slurm.called() == []
    assert _files() == ["bin"]


@pytest.mark.parametrize("verb", ["submit", "train"])
def test_settings_are_checked_also_where_nothing_is_known_of_the_data(
    verb: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    task = str(Path(__file__).parents[1] / "tiny_task.py")  # it knows its sizes only once it has its data
    assert main([verb, task, "--device", "cpu", "--num-gpus", "2", "--batch-size", "-1"]) == 2
    assert capsys.readouterr().err.startswith("stormo: --batch-size -1 was set, but it must be at least 1; ")
    assert main([verb, task, "--device", "cpu", "--num-gpus", "2", "--strategy", "local", "--servers", "2"]) == 2
    assert capsys.readouterr().err.startswith("stormo: --servers 2 was set, but it needs --strategy server; ")
    assert slurm.called() == []


def test_what_slurm_refuses_leaves_nothing_behind(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    slurm.says("sbatch", "", reason, 1)
    assert _submit("--runs-folder", "a/b") == 2
    assert capsys.readouterr().err == (
        "stormo: the job was handed to Slurm, but sbatch refused it (Invalid qos specification); "
        "set --qos to one of yours (sacctmgr show associations user=$USER format=account,qos).\n"
    )
    assert _files() == ["bin"]


def test_a_slurm_that_does_not_answer_is_not_said_to_refuse(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says("sbatch", "", "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n", 1)
    slurm.says("sinfo", "", "sinfo: error: Could not establish a configuration source\n", 1)
    assert _submit() == 2
    assert capsys.readouterr().err == (
        "stormo: the job was handed to Slurm, but Slurm cannot be reached (resolve_ctls_from_dns_srv: res_nsearch "
        "error: Unknown host); see whether slurmctld is up (scontrol ping) and whether this machine has its "
        "slurm.conf.\n"
    )
    assert _files() == ["bin"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(
            ("90", 5400),
            ("1:30", 90),
            ("02:00:00", 7200),
            ("1-12", 129600),
            ("1-12:30", 131400),
            ("2-00:00:10", 172810),
        ),
        *(("0", float("inf")), ("UNLIMITED", float("inf")), ("1:2:3:4", None), ("2h", None), ("", None), ("-5", None)),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_no_option_of_the_job_hides_one_of_the_training() -> None:
    own = {option.flag for option in slurm_options()}
    assert own.isdisjoint(option.flag for option in options.train_options())
    assert Slurm().on_time_limit == "requeue"
