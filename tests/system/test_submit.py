"""Trainings as Slurm jobs: submitted, warned of their time limit, preempted, and always exact.

Jobs of one test run beside another: the controller looks at time limits every 30 seconds only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.energy import read_bill
from stormo.telemetry.events import read_events
from tests.system.hosts import Host, Job, wait_until
from tests.system.runs import HERE, PYTHON, Digests, digests_of
from tests.system.slurm import Cluster

STORMO = (PYTHON, "-m", "stormo")
DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """What is left behind is looked at when all tests of this file are done."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_at_last(hosts: tuple[Host, Host]) -> Iterator[None]:
    yield
    try:
        wait_until(
            lambda: not any(host.leftovers() for host in hosts), 60.0, lambda: str([one.leftovers() for one in hosts])
        )
    finally:
        for host in hosts:
            host.end_jobs()


class Run:
    """One submitted run in a folder of its own, held up until it is let go."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        self.hold = folder / "hold"
        self.hold.touch()
        self.path = folder / "run"

    def submit(self, *options: str, **environ: str) -> Job:
        """Run `stormo submit` to its end."""
        settings = ["--epochs", "3", "--target-accuracy", "1", "--patience", "100"]
        place = ["--runs-folder", str(self.folder), "--run-name", "run", "--device", "cpu", "--num-gpus", "2"]
        words = [*settings, *place, "--task.hold", str(self.hold), "--timeout", "60"]
        settled = [f"{name}={value}" for name, value in environ.items()]
        job = self.cluster.start("env", *settled, *STORMO, "submit", str(HERE / "held_task.py"), *words, *options)
        job.wait()
        return job

    def call(self, verb: str, *options: str) -> str:
        """Run another verb on it; what it says."""
        return self.cluster.command(*STORMO, verb, *options, "--runs-folder", str(self.folder))

    def number(self) -> str:
        """The number of its job."""
        return str(json.loads((self.path / "slurm.json").read_text())["job_id"])

    def restarts(self) -> int:
        """How often Slurm has requeued it."""
        shown = self.cluster.command("scontrol", "--oneliner", "show", "job", self.number())
        return int(shown.partition("Restarts=")[2].split()[0])

    def wait_for_end(self) -> str:
        """Wait until the training has ended; what the job has written."""
        wait_until(lambda: self.attempts()[-1][2] == "end 0", DEADLINE_S, lambda: str(self.attempts()))
        return (self.path / "slurm.log").read_text(encoding="utf-8")

    def wait_for_start(self, number: int) -> None:
        """Wait until the training has begun, or gone on, so many times."""
        wait_until(lambda: len(self.jobs()) >= number, DEADLINE_S, lambda: f"no start {number}: {self.attempts()}")

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until the log of the job has it."""
        log = self.path / "slurm.log"

        def text() -> str:
            return log.read_text(errors="replace") if log.exists() else ""

        wait_until(lambda: text().count(words) >= times, DEADLINE_S, lambda: f"{words!r} did not come in:\n{text()}")

    def jobs(self) -> list[tuple[int | None, str, int, str]]:
        """Of every start of the training: the step it went on from, its job, restarts and nodes."""
        starts = [event for event in read_events(self.path / "events.jsonl") if event["event"] == "run_started"]
        return [
            (start["resumed_at_step"], start["job"]["id"], start["job"]["restarts"], start["job"]["nodes"])
            for start in starts
        ]

    def attempts(self) -> list[list[str]]:
        """The lines that the script has noted, each as the job, the time, and what happened."""
        return [line.split(" ", 2) for line in (self.path / "slurm-attempts.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def make_run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return lambda name: Run(cluster, tmp_path_factory.mktemp("submit") / name)


@pytest.fixture(scope="module")
def limited(make_run: Callable[[str], Run]) -> Run:
    """A training that is longer than its time limit, under way while other tests run."""
    run = make_run("limited")
    trace = run.folder / "trace.jsonl"
    source = {"id": "cpu", "kind": "cpu", "name": "a CPU", "method": "counter", "resolution_j": 1e-6}
    lines: list[dict[str, Any]] = [{"sources": [source | {"interval_s": 0.001}], "origin_unix_s": time.time()}]
    lines += [{"time_s": t, "raw": {"cpu": 90.0 * t}} for t in range(3600)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.submit("--nodelist", "n1", "--time", "1", "--warn-s", "30", STORMO_ENERGY_TRACE=str(trace)).wait() == 0
    return run


@pytest.fixture(scope="module")
def preempted(make_run: Callable[[str], Run]) -> Run:
    """A training that has a node for itself, for now."""
    run = make_run("preempted")
    assert run.submit("--nodelist", "n2", "--exclusive", "--num-gpus", "1").wait() == 0
    return run


@pytest.mark.usefixtures("limited", "preempted")  # which have the time to start meanwhile
def test_what_slurm_refuses_is_one_sentence_with_its_own_reason_and_leaves_nothing(
    make_run: Callable[[str], Run],
) -> None:
    run = make_run("refused")
    for options, reason, instead in (
        (["--partition", "nope"], "invalid partition specified: nope", "set --partition to one of: all, urgent"),
        (["--partition", "physics", "--account", "chemistry"], "account", "set --account to one of yours"),
        (["--num-nodes", "3"], "node", "sinfo --Node --long"),
        (["--cpus-per-task", "64"], "more processors requested than permitted", "ask for fewer workers"),
        (["--device", "cuda"], "generic resource", "or --device cpu"),
    ):
        job = run.submit(*options)
        assert job.wait() == 2, job.out
        assert job.out == ""
        assert job.err.startswith("stormo: the job was handed to Slurm, but sbatch refused it ("), job.err
        assert job.err.count("\n") == 1
        assert reason in job.err.lower()
        assert instead in job.err
        assert not run.path.exists()


def test_a_run_that_is_under_way_is_not_submitted_again(limited: Run) -> None:
    limited.wait_for_start(1)
    again = limited.submit("--resume")
    assert again.wait() == 2
    assert f"job {limited.number()} carries it already" in again.err


def test_a_job_that_is_preempted_and_then_loses_its_node_ends_with_the_same_bits(
    cluster: Cluster,
    hosts: tuple[Host, Host],
    preempted: Run,
    local_digests: Callable[[int], Digests],
) -> None:
    run = preempted
    run.wait_for_start(1)
    urgent = ("sbatch", "--partition=urgent", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.command(*urgent)
    run.wait_for("PREEMPTION")
    run.wait_for_start(2)
    for state in ("drain", "down"):  # one that is down alone comes back by itself
        cluster.command("scontrol", "update", "nodename=n2", f"state={state}", "reason=tests")
    wait_until(lambda: run.restarts() == 2, DEADLINE_S, "it was not queued again")
    run.hold.unlink()
    wait_until(lambda: not hosts[1].processes(), DEADLINE_S, "the attempt before did not end")
    cluster.command("scontrol", "update", "nodename=n2", "state=resume")
    run.wait_for_end()
    assert digests_of(run.folder) == local_digests(1)
    starts = run.jobs()
    assert [(restarts, nodes) for _, _, restarts, nodes in starts] == [(0, "n2"), (1, "n2"), (2, "n2")]
    assert len({job_id for _, job_id, _, _ in starts}) == 1
    assert starts[1][0] is not None
    # Slurm itself has queued the job again, both times; the script has not.
    assert not [what for _, _, what in run.attempts() if what == "requeue"]


def test_a_time_limit_shorter_than_the_training_is_lived_with_and_all_attempts_are_one_run(
    limited: Run, local_digests: Callable[[int], Digests]
) -> None:
    run = limited
    run.wait_for("stopped at step", times=2)
    run.hold.unlink()
    written, number = run.wait_for_end(), run.number()
    assert written.count("Epoch = 1:") == written.count("Epoch = 3:") == 1
    assert digests_of(run.folder) == local_digests(2)
    starts = run.jobs()
    assert len(starts) >= 3  # on a slow machine more
    assert [(job_id, restarts) for _, job_id, restarts, _ in starts] == [(number, n) for n in range(len(starts))]
    again = ["start n1", "end 75", "requeue"] * (len(starts) - 1)
    assert [what for _, _, what in run.attempts()] == [*again, "start n1", "end 0"]
    bill = read_bill(run.path)
    assert all(attempt.resumed_at_step == start[0] for attempt, start in zip(bill.attempts, starts, strict=True))
    # What it drew and how long it took do not count the time in the queue.
    times = [int(at) for _, at, what in run.attempts() if what.startswith(("start", "end"))]
    ran_s = sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["train_time_s"] < summary["wall_time_s"] < ran_s + len(starts)
    assert 0 < summary["energy_j"] < 90.0 * (ran_s + len(starts))
    shown = run.call("show", "run")
    assert f"  from step {starts[2][0]} with 2 workers: Slurm job {number}, restart 2, on n1\n" in shown
    page = run.path / "report.html"
    run.call("report", "run")
    assert f"Slurm job {number}, restart 2, on n1" in page.read_text(encoding="utf-8")
