"""The tasks of an srun step train, fail and stop as one job; what is no step of several tasks is one process."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

from tests.system.hosts import Host, process_of_rank
from tests.system.runs import ENDS_WITHIN_S, SLOW, STEPS_PER_EPOCH, Digests, Train, digests_of, summary_of
from tests.system.slurm import Cluster

TWO_NODES = ("srun", "--quiet", "-N2", "--ntasks-per-node=1")  # not that a job waits for the one before it
ONE_NODE = ("srun", "--quiet", "-N1", "-n2")


def test_flags_that_contradict_the_step_are_refused_by_one_sentence(cluster: Cluster, train: Train) -> None:
    job = cluster.start(*ONE_NODE, *train("--num-gpus", "4"))
    assert job.wait() == 2
    sentence = (
        "stormo: --num-gpus 4 was set, but srun started 2 tasks on this node; "
        "drop --num-gpus or start srun with --ntasks-per-node 4."
    )
    assert job.first_line == sentence
    job = cluster.start(*TWO_NODES, *train("--num-nodes", "3"))
    assert job.wait() == 2
    assert job.first_line.startswith("stormo: --num-nodes 3 was set, but srun started the job on 2 nodes")
    assert not train.folder.exists()


def test_a_killed_rank_0_ends_the_step_and_is_named_first(
    cluster: Cluster, hosts: tuple[Host, Host], train: Train
) -> None:
    # test_script.py has a rank that raises.
    job = cluster.start(*TWO_NODES, *train(*SLOW))
    job.wait_for("Epoch = 1:")
    os.kill(process_of_rank(hosts[0], 0), signal.SIGKILL)
    assert job.wait(ENDS_WITHIN_S) != 0
    # srun writes about the same death in lines of its own.
    said = [line for line in job.err.splitlines() if not line.startswith("srun: ")]
    assert said[0].startswith("stormo: rank 0 on host n1 was killed, or ended without a message; ")
    assert "Traceback" not in job.err


def test_a_step_on_two_nodes_stopped_by_a_signal_ends_with_75_and_goes_on_on_one_to_the_same_bits(
    cluster: Cluster, train: Train, local_digests: Callable[[int], Digests]
) -> None:
    hold, slow = train.slowly("0.2")
    job = cluster.start(*TWO_NODES, *train(*slow))
    job.wait_for("Epoch = 1:")
    cluster.command("scancel", "--signal=USR1", cluster.step())
    assert job.wait(ENDS_WITHIN_S) == 75
    assert "2 = 2 nodes × 1 CPU process" in job.out
    stopped = summary_of(train.folder)
    assert stopped["stopped_by"] == "signal"
    whole = local_digests(2)
    assert STEPS_PER_EPOCH <= stopped["steps"] < whole.num_steps
    hold.unlink()
    job = cluster.start(*ONE_NODE, *train.resume())
    assert job.wait() == 0, job.err
    assert job.err == ""
    assert "2 = 1 node × 2 CPU processes" in job.out
    assert job.out.count("Epoch = 3:") == 1
    assert digests_of(train.folder) == whole
    assert summary_of(train.folder)["num_resumes"] == 1


def test_what_is_no_step_of_several_tasks_is_one_process_and_told_so(
    cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    dry_run = train("--dry-run")
    script, output = tmp_path / "job.sh", tmp_path / "batch.txt"
    script.write_text(f"#!/bin/sh\n{shlex.join(dry_run)}\necho $?\n{shlex.join(dry_run)} --num-gpus 2\n")
    batch = cluster.start("sbatch", "-N2", "--ntasks-per-node=1", "--wait", f"--output={output}", str(script))
    allocation = cluster.start("salloc", "-N2", "--ntasks-per-node=1", *dry_run)
    one_task = cluster.start("srun", "--quiet", "-N1", "-n1", *dry_run)
    for job in (batch, allocation, one_task):
        assert job.wait() == 0, job.err
    one = "workers        1 = 1 node × 1 CPU process (the default; "
    # In a script it is a mistake, unless it says how many workers it wants.
    refused, code, *started = output.read_text().splitlines()
    assert refused.startswith(
        "stormo: stormo was started in the body of a Slurm batch script without srun, but the job asks for "
        "2 tasks on 2 nodes and only this one process would train; write srun in front of it"
    )
    assert code == "2"
    assert started[1].startswith("workers        2 = 1 node × 2 CPU processes (as set; ")
    assert allocation.out.startswith(one)
    assert "stormo: this Slurm job has 2 tasks on 2 nodes, and this is one process; srun in front" in allocation.err
    assert one_task.out.startswith(one)
    assert one_task.err == ""


def test_an_uneven_step_trains_and_says_so(cluster: Cluster, train: Train) -> None:
    job = cluster.start("srun", "--quiet", "-N2", "-n3", *train("--dry-run"))
    assert job.wait() == 0, job.err
    assert job.err == "stormo: srun put 2, 1 tasks on the 2 nodes\n"
    assert "\nworkers        3 on 2 nodes, 2 of them on this one (started by slurm; " in job.out
    assert job.out.count("workers   ") == 1
