"""The command: from start to end, through kills, signals and damaged checkpoints; all train the tiny task.

The undisturbed run is started as a user does it. `tests.forked` forks the others, which start as quickly as they can.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.telemetry.events import current_events, read_events
from tests import forked, programs

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
# 1001 samples in batches of 128: eight steps an epoch, the last one with 105.
SETTINGS = [
    "--batch-size",
    "64",
    "--epochs",
    "2",
    "--target-accuracy",
    "2",
    "--checkpoint-every",
    "3",
    "--no-tensorboard",
]
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "STORMO_", "TINY_")
_EPOCH_LINE = re.compile(
    r"Epoch = (\d+): Cumulative Time = \d+\.\d{3}, Epoch Time = \d+\.\d{3}, Samples/sec = \d+\.\d{2}, "
    r"Validation Loss = \d+\.\d{3}, Validation Accuracy = (0|1)\.\d{3}"
)


def stormo(
    folder: Path, *arguments: str, fault: str = "", is_forked: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `stormo train` on the tiny task in a folder."""
    with start(folder, *arguments, fault=fault, is_forked=is_forked, **variables) as process:
        try:
            output, errors = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(
    folder: Path, *arguments: str, fault: str = "", is_forked: bool = True, **variables: str
) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environ |= {"OMP_NUM_THREADS": "1", "TINY_FAULT": fault or "none -1 0", **variables}
    command = [sys.executable, "-m", "stormo", "train", TASK, *SETTINGS, *arguments]
    popen = forked.Popen if is_forked else subprocess.Popen[str]
    return popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def in_ranks(folder: Path, *arguments: str, num_workers: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same in processes that another launcher has started; see `tests.programs`."""
    words = ["-m", "stormo", "train", TASK, *SETTINGS, "--num-gpus", str(num_workers), *arguments]
    return programs.run(words, folder, num_workers, **variables)


def here(*arguments: str) -> int:
    """The same in this process, with one worker."""
    return main(["train", TASK, "--device", "cpu", *SETTINGS, *arguments])


def session(leader: int) -> list[int]:
    """The processes, ended ones aside, that a command started in a session of its own has left."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, owner = entry.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == leader and state != "Z":
                found.append(int(entry.parent.name))
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return loaded


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("."))


def copy(run: Path, folder: Path) -> Path:
    """The same run in another folder."""
    return Path(shutil.copytree(run, folder / "runs" / run.name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of two workers to its end, watched from inside."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ("--num-gpus", "2", "--run-name", "one")
    done = stormo(folder, *flags, fault="listeners 0 4", is_forked=False, TINY_WATCH_WRITES="1")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "one", done


# --- from start to end ------------------------------------------------------------------------------------------------


def test_standard_output_on_a_pipe_is_the_plan_and_one_fixed_line_for_each_epoch(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    lines = whole[1].stdout.splitlines()
    assert lines[0].startswith("as 1 worker    no; set --global-batch-size 64 ")
    assert lines[1].startswith("workers        2 = 1 node × 2 CPU processes (as set; ")
    assert lines[3] == "global batch   128 = 64 per worker × 2 workers × 1 accumulation"
    epochs = [_EPOCH_LINE.fullmatch(line) for line in lines[-3:-1]]
    assert [match and match[1] for match in epochs] == ["1", "2"]
    assert lines[-1].startswith("Energy: ")
    stored = read_events(whole[0] / "events.jsonl")[0]["explanation"]
    hidden = ("compile ", "graph ", "autotune ")  # what a CPU lacks
    assert lines[:-4] == [line for line in stored if not line.startswith(hidden)]
    assert lines[-4] == "run folder: runs/one"


def test_verbose_prints_the_whole_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("--verbose", "--epochs", "1", "--run-name", "v") == 0
    stored = read_events(tmp_path / "runs" / "v" / "events.jsonl")[0]["explanation"]
    assert capsys.readouterr().out.splitlines()[: len(stored)] == stored


def test_the_run_folder_holds_what_happened(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, _ = whole
    result = summary(run)
    assert {key: result[key] for key in ("run_name", "strategy", "world_size", "global_batch_size", "device")} == {
        "run_name": "one",
        "strategy": "ddp",
        "world_size": 2,
        "global_batch_size": 128,
        "device": "cpu",
    }
    assert (result["epochs_run"], result["steps"], result["samples_seen"]) == (2, 16, 2002)
    assert (result["stopped_by"], result["num_resumes"], result["time_to_target_s"]) == ("epochs", 0, None)
    assert result["wall_time_s"] > result["train_time_s"] > 0
    names = [event["event"] for event in read_events(run / "events.jsonl")]
    assert names[0] == "run_started"
    assert names[-1] == "run_ended"
    assert names.count("epoch_done") == 2
    assert names.count("checkpoint_saved") == 7  # steps 3, 6, 8 (the best so far), 9, 12, 15 and the end
    assert checkpoints(run)[-2:] == ["step-00000015", "step-00000016"]
    started = read_events(run / "events.jsonl")[0]
    said = [line.partition("  ")[0] for line in started["explanation"]]
    assert ("batch norm" in said, "channels last" in said) == (True, False), "the model has no convolution"
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["world_size"] == 2
    page = Path(__file__).parents[2].joinpath("docs", "run-folder.md").read_text(encoding="utf-8")
    files = {f"{path.name}{'/' * path.is_dir()}" for path in run.iterdir()}
    assert [name for name in sorted({*result, *files}) if f"`{name}`" not in page] == []


def test_only_rank_0_writes_into_the_run_folder(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    writers = set(re.findall(r"rank (\w+) wrote \S*runs/", whole[1].stderr))
    assert writers == {"0"}


def test_nothing_of_a_job_on_one_machine_listens_where_others_could_reach_it(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    (found,) = re.findall(r"^listeners (.*)$", whole[1].stderr, flags=re.MULTILINE)
    assert found.split()
    assert set(found.split()) <= {"0100007F", "00000000000000000000000001000000"}


def test_early_stopping_says_so_and_a_name_is_taken_only_once(tmp_path: Path) -> None:
    arguments = ["--run-name", "alone", "--target-accuracy", "0", "--patience", "1"]
    done = in_ranks(tmp_path, *arguments, num_workers=1)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2] == "Early stopping after epoch 1"
    result = summary(tmp_path / "runs" / "alone")
    assert (result["stopped_by"], result["epochs_run"]) == ("target", 1)
    assert result["time_to_target_s"] == result["train_time_s"]
    again = in_ranks(tmp_path, *arguments, num_workers=1)
    assert again.returncode == 2
    assert again.stdout == ""
    assert again.stderr == (
        "stormo: --run-name alone was set, but runs/alone exists; resume it with --resume alone, or set another name.\n"
    )
    assert summary(tmp_path / "runs" / "alone") == result


# --- killed and resumed -----------------------------------------------------------------------------------------------


def test_after_two_kills_and_a_sigterm_the_very_same_line_ends_with_the_same_weights(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    expected = summary(whole[0])
    line = ["--num-gpus", "2", "--run-name", "one", "--resume"]  # it serves the first start as well
    run = tmp_path / "runs" / "one"
    # By rank 0, which has saved by then: another one may be in its next step while that is still saving. First the
    # agent is killed, then all ranks without an agent.
    for at_call, saved in [(7, 3), (8, 8)]:
        fault = f"kill-job 0 {at_call}"
        killed = stormo(tmp_path, *line, fault=fault) if saved == 3 else in_ranks(tmp_path, *line, TINY_FAULT=fault)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert checkpoints(run)[-1] == f"step-{saved:08d}"
        assert not (run / "summary.json").exists()
    _ends_like(whole[0], run, tmp_path / "after-kills", num_resumes=2)
    # Both calls are of the first steps after the last checkpoint.
    stopped = stormo(tmp_path, *line, fault="term-job 1 3")
    assert stopped.returncode == 75, stopped.stderr
    result = summary(run)
    assert result["stopped_by"] == "signal"
    assert 8 < result["steps"] < expected["steps"]
    assert checkpoints(run)[-1] == f"step-{result['steps']:08d}"
    _ends_like(whole[0], run, tmp_path / "after-sigterm", num_resumes=3)


def _ends_like(whole: Path, run: Path, folder: Path, *, num_resumes: int) -> None:
    """Let a copy of a run resume to its end, which must be that of the undisturbed one."""
    copied = copy(run, folder)
    ended = in_ranks(folder, "--run-name", "one", "--resume")
    assert ended.returncode == 0, ended.stderr
    result, expected = summary(copied), summary(whole)
    assert result["num_resumes"] == num_resumes
    for key in ("weights_sha256", "sample_order_sha256", "steps", "samples_seen", "validation_accuracy"):
        assert result[key] == expected[key], key
    losses = [
        [
            event["train_loss"]
            for event in current_events(read_events(path / "events.jsonl"))
            if event["event"] == "epoch_done"
        ]
        for path in (whole, copied)
    ]
    assert losses[0] == losses[1]


def test_another_number_of_workers_resumes_with_the_same_batch_and_learning_rate(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    run = copy(whole[0], tmp_path)
    path = run / "checkpoints" / "step-00000015"
    done = in_ranks(tmp_path, "--resume", str(path), num_workers=1)
    assert done.returncode == 0, done.stderr
    batch = "global batch   128 as before = 64 per worker × 1 worker × 2 accumulation; it began with 2 workers"
    assert batch in done.stdout
    assert "learning rate  0.02 as before" in done.stdout
    result, before = summary(run), summary(whole[0])
    assert (result["world_size"], result["steps"], result["num_resumes"]) == (1, 16, 1)
    assert result["sample_order_sha256"] == before["sample_order_sha256"]
    assert checkpoints(run)[-1].startswith("superseded-step-00000016-")  # kept, but never resumed from


def test_a_damaged_checkpoint_is_refused_and_the_good_one_offered_and_taken(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    run = copy(whole[0], tmp_path)
    newest = run / "checkpoints" / "step-00000016" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    refused = in_ranks(tmp_path, "--resume", "one", num_workers=1)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "at least one byte changed since it was written" in refused.stderr
    offered = re.search(r"--resume (\S+?)\.?\n", refused.stderr)
    assert offered
    assert offered[1] == "runs/one/checkpoints/step-00000015"
    assert checkpoints(run)[-1] == "step-00000016"  # nothing was moved or removed
    done = in_ranks(tmp_path, "--resume", offered[1], num_workers=1)
    assert done.returncode == 0, done.stderr
    assert summary(run)["steps"] == 16


def test_a_killed_run_leaves_no_loading_process_behind(tmp_path: Path) -> None:
    arguments = ["--num-gpus", "1", "--task.noisy", "--loader-workers", "2"]
    with start(tmp_path, *arguments, fault="kill-job 0 5") as killed:
        assert killed.wait(timeout=240) == -signal.SIGKILL
        assert wait_until(lambda: not session(killed.pid)), session(killed.pid)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise 1 7", "rank 1 on host .* failed: ValueError: .*"),
        ("kill 1 7", "rank 1 on host .* was killed by SIGKILL .*"),
    ],
)
def test_a_failed_worker_makes_a_failed_run_and_the_last_line_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, cause: str
) -> None:
    failed = stormo(tmp_path, "--num-gpus", "2", "--run-name", "f", fault=fault)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "stormo: resume with: stormo train --resume f"
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["state"] == "failed"
    # Rank 0 may have seen that its peer is gone, and written a summary, before it was ended.
    assert re.fullmatch(cause, one["note"] or "") or summary(tmp_path / "runs" / "f")["stopped_by"] == "error"
    assert main(["runs"]) == 0
    assert "killed (last event" not in capsys.readouterr().out


def test_a_failed_run_of_one_worker_names_its_cause_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = stormo(tmp_path, "--num-gpus", "1", "--run-name", "f", fault="raise 0 7")
    assert failed.returncode == 1
    *_, error, hint = failed.stderr.splitlines()
    assert error.startswith("ValueError: ")
    assert hint == "stormo: resume with: stormo train --resume f"
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["state"] == "failed"
    assert re.fullmatch(f"rank 0 on host .* failed: {re.escape(error)}", one["note"])


def test_before_a_checkpoint_there_is_no_word_of_a_resume(tmp_path: Path) -> None:
    failed = stormo(tmp_path, "--num-gpus", "2", "--run-name", "f", "--checkpoint-every", "0", fault="kill 1 4")
    assert failed.returncode == 1
    assert "--resume" not in failed.stderr


_COLLECTING_TASK = """
import gc
import stormo
import torch

class Task(stormo.Task):
    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(8, 2))

    validation_data = train_data

    def model(self):
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def on_train_start(self, context):
        print("collection:", gc.get_threshold(), gc.get_freeze_count())
"""


def test_garbage_is_collected_as_usual_while_a_task_trains_but_not_among_imports(tmp_path: Path) -> None:
    usual = subprocess.run(
        [sys.executable, "-c", "import gc; print(gc.get_threshold())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (tmp_path / "task.py").write_text(_COLLECTING_TASK)
    command = [sys.executable, "-m", "stormo", "train", "task.py", "--num-gpus", "1", "--batch-size", "8"]
    with forked.Popen([*command, "--epochs", "1"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    (seen,) = re.findall(r"^.*collection: (\(.*\)) (\d+)$", output, re.MULTILINE)
    assert seen[0] == usual
    assert int(seen[1]) > 100_000


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "code"), [("usr1-job 0 7", 75), ("interrupt-job 0 7", 130)])
def test_sigusr1_exits_with_75_and_ctrl_c_with_130_both_saved(tmp_path: Path, fault: str, code: int) -> None:
    stopped = in_ranks(tmp_path, "--run-name", "a", num_workers=1, TINY_FAULT=fault)
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr
    run = tmp_path / "runs" / "a"
    assert summary(run)["stopped_by"] == "signal"
    # The first two calls are the sanity check's, the seventh is in step 5; the signal is seen at the start of the next
    # step, and that step is finished.
    assert checkpoints(run)[-1] == "step-00000006"


# --- before any process starts ----------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "fashion-mnist", "--device", "cpu", "--num-gpus", "4", "--batch-size", "512", "--dry-run"]
    assert main(arguments) == 0
    output = capsys.readouterr().out.splitlines()
    assert "global batch   2048 = 512 per worker × 4 workers × 1 accumulation" in output
    assert list(tmp_path.iterdir()) == []


def test_a_changed_seed_is_refused_with_what_to_do(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(whole[0].parent.parent)
    assert main(["train", TASK, "--resume", "one", "--seed", "1"]) == 2
    assert capsys.readouterr().err == (
        "stormo: --seed 1 was set with --resume, but run one was started with --seed 0, and the order of all samples "
        "follows from it; leave it out, or start a new run.\n"
    )


def test_what_cannot_hold_is_shown_once_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "fashion-mnist", "--device", "cpu", "--num-gpus", "2", "--momentum", "2"]) == 2
    assert capsys.readouterr().err.startswith("stormo: --momentum 2 was set, but it must lie in [0, 1); ")
    assert list(tmp_path.iterdir()) == []
