"""The verbs `submit`, `status` and `cancel` where Slurm's commands are small fakes that keep one job in a file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.config import options
from stormo.submit import client, follow
from stormo.submit.settings import Slurm, seconds_of, slurm_options

TASK = str(Path(__file__).parents[1] / "system" / "task.py")
LINE = (
    "JobId=12 JobName=a Reason=x b UserId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 ExitCode={code} NodeList={nodes} BatchHost=n1 CPUs/Task=1 Comment=JobState=no"
)


class Slurmlike:
    """A folder of commands that answer what they are told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.calls = folder / "calls"
        self.says("sbatch", "12")
        self.says("scancel", "")
        self.says("sinfo", "main")
        self.job()

    def says(self, name: str, text: str, error: str = "", code: int = 0) -> None:
        """Let a command print something and end."""
        (self.folder / f"{name}.out").write_text(text)
        (self.folder / f"{name}.err").write_text(error)
        at = self.folder / name
        at.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\ncat {at}.out\ncat {at}.err >&2\nexit {code}\n')
        at.chmod(0o755)

    def job(
        self, state: str = "RUNNING", *, reason: str = "None", code: str = "0:0", restarts: int = 0, nodes: str = "n1"
    ) -> None:
        """Let the job be in a state."""
        self.says("scontrol", LINE.format(state=state, reason=reason, code=code, restarts=restarts, nodes=nodes))

    def forgets(self) -> None:
        """Let the job be one that nobody knows."""
        self.says("scontrol", "", "slurm_load_jobs error: Invalid job id specified", 1)
        self.says("sacct", "", "Slurm accounting storage is disabled", 1)

    def called(self) -> list[str]:
        """Every call so far."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurmlike:
    made = Slurmlike(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return made


def _submit(*words: str) -> int:
    return main(["submit", TASK, "--device", "cpu", "--run-name", "one", "--no-follow", *words])


def _files(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _note(*lines: str) -> None:
    Path("runs/one/slurm-attempts.txt").write_text("".join(f"{line}\n" for line in lines))


def _row(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", "one", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return dict(row)


def test_a_submitted_run_has_its_script_and_its_job_and_has_not_begun(
    slurm: Slurmlike, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit("--num-gpus", "2") == 0
    assert capsys.readouterr().out.startswith(
        f"job 12: run one in {tmp_path}/runs/one, log {tmp_path}/runs/one/slurm.log"
    )
    assert slurm.called() == [f"sbatch --parsable {tmp_path}/runs/one/job.sh"]
    assert "#SBATCH --ntasks-per-node=2\n" in Path("runs/one/job.sh").read_text()
    assert json.loads(Path("runs/one/slurm.json").read_text())["job_id"] == "12"
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.startswith("No run in runs")
    assert main(["show", "one"]) == 2
    assert "it was submitted and has not begun; see stormo status one." in capsys.readouterr().err
    slurm.job("PENDING", reason="Resources", nodes="(null)")
    row = _row(capsys)
    assert (row["job"], row["state"], row["why"], row["starts"]) == ("12", "waiting", "Resources", 0)
    assert _submit("--num-gpus", "2") == 2
    assert "job 12 carries it already (pending); wait for its end" in capsys.readouterr().err


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
        "stormo: a job was to be submitted to Slurm, but sbatch is not among the commands of this machine; "
        "do it on a login node of the cluster; --print shows the script anywhere.\n"
    )
    assert _files() == ["a.toml"]


def test_every_setting_that_is_given_is_told_to_the_training_and_nothing_else(
    slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
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
        (["--sweep", "base_lr=0.1,0.2", "--array", "0-3"], "--array was set with --sweep"),
        (["--sweep", "base_rl=0.1"], "did you mean base_lr?"),
        (["--sweep", "num_gpus=1,2"], "num_gpus was set in --sweep, but it is the same for all runs of a job"),
        (["--sweep", "seed=0,0"], "a value of seed is there twice"),
        (["--sweep", "seed=0,one"], "seed in --sweep was set to 'one'"),
        (["--sweep", "global_batch_size=8,0"], "a global batch of 0 was set"),
        (["--array", "4-1"], "'4-1' is no range of seeds"),
        (["--array-limit", "2"], "--array-limit 2 was set, but there is one run"),
        (["--apptainer", "no.sif"], "--apptainer no.sif was set, but there is no such file"),
        (["--bind", "/data"], "--bind /data was set, but there is no image that could see it"),
        (["--sbatch", "--nodes=3"], "--nodes is said by --num-nodes"),
        (["--setup-file", "bin"], "--setup-file bin was set, but it cannot be read (Is a directory); name a file of"),
        (["--setup-file", sys.executable], "was set, but it cannot be read (it is no text in UTF-8); name a file of"),
        (["--log", "bin"], "--log bin was set, but that is a folder; name a file in it"),
        (["--log", "no/where.txt"], "--log no/where.txt was set, but there is no such folder"),
        (["--partition", 'a"b'], "--partition was set to 'a\"b'"),
        (["--no-slurm"], "--no-slurm was set"),
        (["--dry-run"], "--dry-run was set for a job that is submitted"),
        (["--run-name", "a/b"], "--run-name 'a/b' was set"),
        (["--run-name=-a"], "--run-name '-a' was set"),
        (["--sweep", "lr=0.1,0.2"], "did you mean base_lr?"),
    ],
)
def test_what_cannot_hold_is_refused_before_slurm_is_asked(
    words: list[str], sentence: str, slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit(*words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert slurm.called() == []
    assert _files() == ["bin"]


@pytest.mark.parametrize("verb", ["submit", "train"])
def test_settings_are_checked_also_where_nothing_is_known_of_the_data(
    verb: str, slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    task = str(Path(__file__).parents[1] / "tiny_task.py")  # it knows its sizes only once it has its data
    assert main([verb, task, "--device", "cpu", "--num-gpus", "2", "--batch-size", "-1"]) == 2
    assert capsys.readouterr().err.startswith("stormo: --batch-size -1 was set, but it must be at least 1; ")
    assert main([verb, task, "--device", "cpu", "--num-gpus", "2", "--strategy", "local", "--servers", "2"]) == 2
    assert capsys.readouterr().err.startswith("stormo: --servers 2 was set with strategy local, but ")
    assert slurm.called() == []


def test_what_slurm_refuses_leaves_nothing_behind(slurm: Slurmlike, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    slurm.says("sbatch", "", reason, 1)
    assert _submit("--runs-folder", "a/b") == 2
    assert capsys.readouterr().err == (
        "stormo: the job was handed to Slurm, but sbatch refused it (Invalid qos specification); "
        "set --qos to one of yours (sacctmgr show associations user=$USER format=account,qos).\n"
    )
    assert _files() == ["bin"]


def test_a_slurm_that_does_not_answer_is_not_said_to_refuse(
    slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says("sbatch", "", "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n", 1)
    slurm.says("sinfo", "", "sinfo: error: Could not establish a configuration source\n", 1)
    assert _submit() == 2
    assert capsys.readouterr().err == (
        "stormo: the job was handed to Slurm, but Slurm cannot be reached (resolve_ctls_from_dns_srv: res_nsearch "
        "error: Unknown host); see whether slurmctld is up (scontrol ping) and whether this machine reaches it and has "
        "its slurm.conf.\n"
    )
    assert _files() == ["bin"]


def test_the_runs_of_a_sweep_have_names_of_their_own(slurm: Slurmlike, capsys: pytest.CaptureFixture[str]) -> None:
    assert _submit("--sweep", "base_lr=0.1,0.2;deterministic=true,false", "--array-limit", "3") == 0
    names = [f"one-{number}" for number in range(4)]
    assert _files("runs") == names
    settings = [json.loads(Path("runs", name, "slurm.json").read_text())["settings"] for name in names]
    assert settings == [
        ["--base-lr", rate, flag] for rate in ("0.1", "0.2") for flag in ("--deterministic", "--no-deterministic")
    ]
    assert "#SBATCH --array=0-3%3\n" in Path("runs/one-3/job.sh").read_text()
    capsys.readouterr()
    assert main(["cancel", "one"]) == 0
    assert [line for line in slurm.called() if line.startswith("scancel")] == [f"scancel 12_{n}" for n in range(4)]


@pytest.mark.usefixtures("slurm")
def test_how_gradients_travel_can_be_swept() -> None:
    assert _submit("--sweep", "compress=none,bf16") == 0
    settings = [json.loads(Path("runs", name, "slurm.json").read_text())["settings"] for name in ("one-0", "one-1")]
    assert settings == [["--compress", "none"], ["--compress", "bf16"]]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("flags", [(), ("--optimizer", "sgd")])
def test_a_run_of_a_sweep_is_told_nothing_of_a_method_that_its_point_replaces(flags: tuple[str, ...]) -> None:
    Path("my.toml").write_text('[optimizer]\noptimizer = "adamw"\nbeta2 = 0.9\nmomentum = 0.8\n')
    assert _submit("--config", "my.toml", *flags, "--sweep", "optimizer=adamw,sgd") == 0
    settings = [json.loads(Path("runs", name, "slurm.json").read_text())["settings"] for name in ("one-0", "one-1")]
    assert settings == [["--optimizer", "adamw", "--beta2", "0.9"], ["--optimizer", "sgd"]]
    script = Path("runs/one-0/job.sh").read_text()
    assert (script.count("--momentum 0.8"), script.count("--beta2")) == (1, 1)  # of all, and of its own run alone


@pytest.mark.parametrize(
    ("notes", "state", "code"),
    [
        (["12 1 start n1", "12 5 end 0"], "done", 0),
        (["12 1 start n1", "12 5 end 65"], "failed", 65),
        (["12 1 start n1", "12 5 end 75", "12 5 chain 13", "13 9 start n1", "13 10 end 0"], "done", 0),
        (["12 1 start n1", "12 3 cancel"], "cancelled", 143),
        (["12 1 start n1"], "no longer known", 1),
    ],
)
def test_a_job_that_slurm_has_forgotten_is_judged_by_what_its_script_noted(
    notes: list[str], state: str, code: int, slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit() == 0
    slurm.forgets()
    _note(*notes)
    row = _row(capsys)
    assert (row["state"], row["exit_code"]) == (state, code)
    assert row["job"] == ("13" if "12 5 chain 13" in notes else "12")
    assert main(["status", "one", "--follow"]) == code


def test_the_accounting_is_asked_of_a_job_that_the_controller_has_forgotten(
    slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit() == 0
    slurm.forgets()
    slurm.says("sacct", "CANCELLED by 1000|0:15|n[1-2]\n")
    row = _row(capsys)
    assert (row["state"], row["exit_code"]) == ("cancelled", 143)


def test_a_log_that_is_made_anew_or_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = follow.Log(path=tmp_path / "slurm.log")
    assert log.read() == ""
    log.path.write_bytes("earlier\nß".encode())
    log.skip()
    with log.path.open("ab") as file:
        file.write("more \N{EURO SIGN}".encode()[:-1])
    assert log.read() == "more "
    log.path.rename(tmp_path / "old")
    assert log.read() == ""
    with (tmp_path / "old").open("ab") as file:
        file.write("\N{EURO SIGN}!".encode()[2:])
    log.path.write_text("again, and longer than before\n")
    assert log.read() == "\N{EURO SIGN}!again, and longer than before\n"
    log.path.write_text("cut\n")
    assert [log.read(), log.read()] == ["cut\n", ""]
    log.close()


def test_following_goes_on_while_the_controller_does_not_answer(
    slurm: Slurmlike, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _submit() == 0
    slurm.says("scontrol", "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    Path("runs/one/slurm.log").write_bytes("Epoch = 1: ß\n".encode())
    monkeypatch.setattr(follow, "_ASK_SLURM_S", 0.2)
    monkeypatch.setattr(follow, "_LOOK_AT_LOG_S", 0.05)
    turns = iter(("PENDING", "PENDING", "COMPLETED"))
    really_sleep = time.sleep
    told = {"PENDING": {"reason": "PartitionTimeLimit"}, "COMPLETED": {}}

    def sleep(seconds: float) -> None:
        really_sleep(seconds)
        state = next(turns, "COMPLETED")
        slurm.job(state, **told[state])  # type: ignore[arg-type]

    monkeypatch.setattr(time, "sleep", sleep)
    capsys.readouterr()
    assert main(["status", "12", "--follow"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("stormo: scontrol does not answer (slurm_load_jobs error: Unable to contact")
    assert "Epoch = 1: ß" in said
    assert said[-1] == "job 12 is done; stormo show one tells the result"


def test_of_a_job_that_slurm_does_not_tell_of_no_end_is_told(
    slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit() == 0
    slurm.says("scontrol", "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    row = _row(capsys)
    assert (row["state"], row["exit_code"]) == ("unknown", None)
    assert "Unable to contact slurm controller" in row["why"]
    slurm.job("CANCELLED")  # while it was waiting
    row = _row(capsys)
    assert (row["why"], row["exit_code"]) == ("exit code 1", 1)


def test_a_folder_that_no_script_can_name_is_refused(
    slurm: Slurmlike, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path('a "b"').mkdir()
    monkeypatch.chdir('a "b"')
    assert _submit() == 2
    assert "a line of an sbatch script holds no such text" in capsys.readouterr().err
    assert (slurm.called(), _files()) == ([], [])


def test_what_scontrol_says_is_read_by_its_keys() -> None:
    state = client.read_job(
        LINE.format(state="PENDING", reason="Nodes_required_for_job_are_DOWN", code="0:15", restarts=2, nodes="(null)")
    )
    assert state == client.JobState(
        state="PENDING", reason="Nodes_required_for_job_are_DOWN", exit_code=143, restarts=2, nodes=""
    )
    assert follow.waiting_words("12", state) == "job 12 is waiting in the queue: Nodes required for job are DOWN"
    never = client.JobState(state="PENDING", reason="PartitionTimeLimit")
    assert follow.waiting_words("12", never).endswith("it needs a shorter --time or another --partition")


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


def test_a_command_that_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Slurmlike, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _submit() == 0
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(["cancel", "one"]) == 2
    assert "scontrol was needed, but it is not among the commands of this machine" in capsys.readouterr().err
