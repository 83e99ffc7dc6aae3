"""Elastic trainings, as the user asks for them and as a worker finds itself; and which ends use up a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stormo import options
from stormo.cli import main
from stormo.config import NodeRange, TrainConfig
from stormo.early_signals import RESTARTING
from stormo.elastic import _Agent, _agree, _store, unnamed
from stormo.errors import SettingError, StormoError
from stormo.launch import torchrun
from stormo.launch.detect import check_flags, detect
from stormo.launch.elastic import (
    Elastic,
    becomes_agent,
    check_elastic,
    elastic_node,
    open_meeting_point,
    wait_for_meeting_point,
)
from stormo.launch.own_folder import own_folder
from stormo.launch.place import Place
from stormo.telemetry.finding import note_launch

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
RUN = Path("runs/a")
WORKER = {
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29511",
}
NO_FLAGS: dict[str, Any] = dict.fromkeys(("num_nodes", "node_id", "num_gpus", "master_addr", "master_port"))
ONE_TASK = Place(
    launcher="slurm",
    rank=1,
    world_size=2,
    local_rank=0,
    local_size=1,
    node_id=1,
    num_nodes=2,
    master_addr="127.0.0.1",
    master_port=12345,
    host="b",
)
TWO = ("--num-nodes", "1:2", "--master-addr", "127.0.0.1")


def configured(**flags: Any) -> TrainConfig:
    return options.make_config(flags, None)


# --- what the user sets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--num-nodes", "4:1"],
            "--num-nodes 4:1 was set, but the least, 4, is more than the most, 1; set --num-nodes 1:4.",
        ),
        (["--num-nodes", "0:2"], "--num-nodes 0:2 was set, but at least one node must take part; set --num-nodes 1:2."),
        (["--num-nodes", "a:b"], "--num-nodes was set to 'a:b', but it takes a number or MIN:MAX; set it to 4 or 1:4."),
        (
            ["--max-restarts", "-1"],
            "--max-restarts -1 was set, but it must be at least 0; set --max-restarts 0 or more.",
        ),
        (
            ["--num-nodes", "1:2"],
            "--num-nodes 1:2 was set without --master-addr, but the nodes must know where they meet",
        ),
        ([*TWO], "--num-nodes 1:2 was set without --run-name, but a node that comes later must find the run"),
        ([*TWO, "--node-id", "1"], "--node-id 1 was set with --num-nodes 1:2, but nodes that may restart number"),
        (["--max-restarts", "1", "--node-id", "0"], "--node-id 0 was set with --max-restarts 1, but nodes that may"),
        ([*TWO, "--run-name", "a", "--mesh", "replicate=2"], "--mesh replicate=2 was set with --num-nodes 1:2, but"),
        ([*TWO, "--run-name", "a", "--strategy", "pipeline"], "--strategy pipeline was set, but there is one worker"),
    ],
)
def test_what_cannot_hold_is_said_in_one_sentence_and_nothing_is_left(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", TASK, "--device", "cpu", "--num-gpus", "1", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"stormo: {sentence}")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_no_place_to_restart_from(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(SettingError, match="every restart would go back to that one checkpoint; name the run"):
        check_elastic(configured(max_restarts=1, resume=str(tmp_path)), None)


def test_the_first_node_refuses_a_run_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.mkdir(parents=True)
    (RUN / "config.toml").touch()
    assert main(["train", TASK, "--device", "cpu", "--max-restarts", "1", "--run-name", "a"]) == 2
    assert "runs/a is there already; go on with it by --resume a" in capsys.readouterr().err


def test_a_script_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", TASK, "--num-nodes", "1:4"]) == 2
    assert "start it by torchrun, whose workers stormo.World joins" in capsys.readouterr().err


def test_a_range_of_nodes_is_the_same_in_a_file(tmp_path: Path) -> None:
    config = configured(num_nodes=NodeRange(1, 4))
    assert (config.workers.num_nodes, config.workers.restarts) == (4, 3)
    assert not configured(num_nodes=4).workers.is_elastic
    file = tmp_path / "run.toml"
    file.write_text('[workers]\nnum_nodes = "2:4"\nmax_restarts = 0\n')
    settings = options.settings_from_toml(options.read_toml(file), options.train_options(), str(file))
    assert str(settings["num_nodes"]) == "2:4"
    assert configured(**settings).workers.is_elastic


# --- one node ---------------------------------------------------------------------------------------------------------


def test_one_node_meets_itself_on_loopback_alone() -> None:
    node = elastic_node(configured(max_restarts=2), 4, RUN, None)
    assert (node.least, node.most, node.num_workers, node.restarts) == (1, 1, 4, 2)
    assert (node.address, node.own_address, node.rendezvous_id) == ("127.0.0.1", "127.0.0.1", "stormo-a")
    listener = open_meeting_point(node)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def _node(address: str = "127.0.0.1", **flags: Any) -> Elastic:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = configured(num_nodes=NodeRange(1, 2), master_addr=address, master_port=port, **flags)
    return elastic_node(config, 1, RUN, None)


def test_whoever_has_the_address_opens_the_meeting_point_once() -> None:
    here = _node()
    first = open_meeting_point(here)
    assert first is not None
    with first:
        assert open_meeting_point(here) is None  # a second node on this machine
    assert open_meeting_point(_node("192.0.2.7")) is None


def test_a_meeting_point_that_nobody_opens_is_one_sentence() -> None:
    with pytest.raises(StormoError, match=r"nobody answered at 127.0.0.1:\d+ within 0.1 s; check --master-addr"):
        wait_for_meeting_point(_node(timeout=0.1))


def test_a_node_that_is_told_otherwise_goes_before_the_others_stop_for_it() -> None:
    node = _node(timeout=20.0)
    listener = open_meeting_point(node)
    held = _store(node, listener)
    _agree(held, node, {"--epochs": "2", "--run-name": "a", "--base-lr": "0.1"}, {"--epochs": "2"})
    wait_for_meeting_point(node)
    comes = _store(node, None)
    _agree(comes, node, None, {"--epochs": "2", "--run-name": "a"})  # the rate it finds in the run
    with pytest.raises(SettingError, match=r"--epochs is 3 on this node, but it is 2 in the training that meets at"):
        _agree(comes, node, None, {"--run-name": "a", "--epochs": "3"})


def test_a_task_of_srun_becomes_the_agent_of_its_node_and_meets_where_slurm_says() -> None:
    config = configured(num_nodes=NodeRange(1, 2), run_name="a")
    assert becomes_agent(config, ONE_TASK)
    assert not becomes_agent(configured(), ONE_TASK)
    check_elastic(config, ONE_TASK)
    node = elastic_node(config, 1, RUN, ONE_TASK)
    assert (node.address, node.port) == ("127.0.0.1", 12345)
    several = Place(**{name: getattr(ONE_TASK, name) for name in Place.__dataclass_fields__} | {"local_size": 2})
    with pytest.raises(SettingError, match="start one task on each node"):
        check_elastic(config, several)


# --- one worker -------------------------------------------------------------------------------------------------------


def test_a_worker_of_the_agent_takes_the_flags_of_its_node() -> None:
    place = detect({**WORKER, torchrun.AGENT: "1", "SLURM_PROCID": "0"})
    assert place is not None
    assert (place.launcher, place.rank, place.num_nodes) == ("elastic", 1, 2)
    assert not becomes_agent(configured(num_nodes=NodeRange(1, 4)), place)
    check_flags(place, **NO_FLAGS | {"num_nodes": NodeRange(1, 4), "master_addr": "there", "master_port": 1234})
    with pytest.raises(SettingError, match="--num-nodes 3:4 was set, but stormo started the job on 2 nodes"):
        check_flags(place, **NO_FLAGS | {"num_nodes": NodeRange(3, 4)})


def test_torchrun_and_not_stormo_counts_the_restarts_of_its_workers() -> None:
    torchrun.check_restarts(WORKER, 3)
    with pytest.raises(SettingError, match="--max-restarts 1 was set, but torchrun starts the workers, with"):
        torchrun.check_restarts(WORKER, 1)


def test_rounds_of_one_torchrun_know_one_another() -> None:
    assert torchrun.launch_id(WORKER) == "job"
    assert torchrun.launch_id({}) is None
    nameless = torchrun.launch_id({**WORKER, "TORCHELASTIC_RUN_ID": "none"})
    assert nameless is not None
    assert f" {os.getppid()} " in nameless  # this very agent


def test_a_run_that_diverged_is_not_started_again_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.mkdir(parents=True)
    (RUN / "config.toml").touch()
    (RUN / "environment.json").write_text(json.dumps({"launches": ["job"]}))
    (RUN / "summary.json").write_text(json.dumps({"stopped_by": "divergence"}))
    note_launch(RUN.parent, "job", RUN.name)
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    assert main(["train", TASK, "--device", "cpu"]) == 65
    assert capsys.readouterr().err == "stormo: run a has diverged, and would again if torchrun restarted it.\n"


# --- what a failed round costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "most", "left"),
    [
        pytest.param({1}, 1, 2, id="a failure, which torch counts next"),
        pytest.param({-9, 1}, 2, 2, id="a worker that was killed"),
        pytest.param({75}, 2, 3, id="another node leaves"),
        pytest.param({75}, 1, 0, id="somebody stopped the only node's workers"),
        pytest.param({2}, 2, 0, id="a setting"),
        pytest.param({65}, 2, 0, id="divergence"),
        pytest.param({130}, 2, 0, id="Ctrl-C"),
    ],
)
def test_what_a_failed_round_costs(codes: set[int], most: int, left: int, tmp_path: Path) -> None:
    agent = _agent(most, tmp_path)
    agent._judge(codes, set())
    assert agent._remaining_restarts == left


def test_a_failure_that_comes_again_at_the_same_point_ends_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = _agent(1, tmp_path)
    agent._judge({1}, {"ValueError: boom"})
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    agent._judge({1}, {"ValueError: boom"})  # it got further
    assert agent._remaining_restarts == 2
    agent._judge({1}, {"ValueError: boom"})
    assert agent._remaining_restarts == 0
    assert capfd.readouterr().err == "stormo: it failed as before, and at the same point: a restart does not help\n"


def test_a_worker_that_dies_before_it_has_met_the_others_is_named_by_its_agent(tmp_path: Path) -> None:
    ends = {10: -signal.SIGTERM, 11: -signal.SIGKILL, 12: 3, 13: -signal.SIGSEGV, 14: 1, 15: 75}  # on the second node
    files = {rank: str(tmp_path / f"{rank}.json") for rank in ends}
    torchrun.note_meeting({"TORCHELASTIC_ERROR_FILE": files[13]})  # so that the others tell of its end
    torchrun.note_failure({"TORCHELASTIC_ERROR_FILE": files[14]}, ValueError("boom"))  # which it has shown itself

    def named(*ranks: int) -> list[tuple[str, str]]:
        failures = {
            rank: ProcessFailure(local_rank=rank - 10, pid=1, exitcode=ends[rank], error_file=files[rank])
            for rank in ranks
        }
        found = unnamed(RunResult(WorkerState.FAILED, failures=failures), {rank - 10: files[rank] for rank in ranks})
        return [(failure.who, failure.what) for failure in found]

    assert named(*ends) == [
        ("rank 11", "was killed by SIGKILL (signal 9)"),
        ("rank 12", "ended with exit code 3 and did not report why"),
    ]
    assert named(10, 13) == [("rank 10", "was killed by SIGTERM (signal 15)")]


@pytest.mark.parametrize("is_signalled", [False, True], ids=["a node comes", "the agent is told to stop"])
def test_a_worker_that_is_stopped_before_it_trains_says_so_unless_its_agent_goes_on(
    is_signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTING, str(tmp_path / "restarting"))
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda *_, **__: None)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    program = "from stormo.early_signals import leave_when_told; leave_when_told(); print(flush=True); input()"
    words, pipe = [sys.executable, "-c", program], subprocess.PIPE
    agent = _agent(2, tmp_path)
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "\n"  # it listens
        agent._pcontext = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=worker)})  # type: ignore[assignment]
        try:
            if is_signalled:
                raise SignalException("signal", sigval=signal.SIGTERM)
            agent._shutdown()
        except SignalException as stopped:
            agent._shutdown(stopped.sigval)
        finally:
            for number, handler in before.items():
                if number not in (signal.SIGKILL, signal.SIGSTOP) and handler is not None:
                    signal.signal(number, handler)
        said = worker.communicate()[1]
    assert worker.returncode == 75
    assert said.count("stopped by SIGTERM before training began") == is_signalled == bool(said)


def test_what_a_killed_agent_has_left_is_removed_by_the_next_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os; from stormo.launch.own_folder import own_folder\nwith own_folder() as folder:\n"
    program += "    (folder / 'logs').mkdir(); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / f"{left.name}-link").symlink_to(tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as another user
        with own_folder() as other:
            assert left.is_dir()
    with own_folder() as living, own_folder() as another:
        assert living.is_dir()
        assert sorted(tmp_path.iterdir()) == sorted(
            [living, another, tmp_path / "mine", tmp_path / f"{left.name}-link"]
        )
    assert [path for path in (other, living, another) if path.exists()] == []


def _agent(most: int, folder: Path) -> _Agent:
    agent = _Agent.__new__(_Agent)
    config = configured(max_restarts=2, **({} if most == 1 else {"num_nodes": most, "master_addr": "127.0.0.1"}))
    agent._node = elastic_node(config, 1, folder, None)
    agent._remaining_restarts = 2
    agent._last_failure = (set(), [])
    agent._num_signals = 0
    return agent
