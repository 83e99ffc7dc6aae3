"""The bill of real runs whose hardware is a recording: one owner a node, attempts and lost work, to the joule."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.energy import read_bill
from stormo.telemetry.events import read_events
from tests import programs
from tests.commands.test_train import SETTINGS, TASK, checkpoints, here, in_ranks, summary

GPU_W, CPU_W, WRAPS_AT_J = 400.0, 90.0, 1000.0
POWER_W = GPU_W + CPU_W
SOURCES = [
    {"id": "GPU-a", "kind": "gpu", "name": "a GPU", "method": "counter", "resolution_j": 0.001, "interval_s": 0.001},
    {"id": "cpu", "kind": "cpu", "name": "a CPU", "method": "counter", "resolution_j": 1e-6, "interval_s": 0.001}
    | {"wraps_at_j": WRAPS_AT_J},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A recording of constant power, whose CPU counter goes round every eleven seconds."""
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [{"sources": SOURCES, "origin_unix_s": time.time()}]
    lines += [{"time_s": t, "raw": {"GPU-a": GPU_W * t, "cpu": CPU_W * t % WRAPS_AT_J}} for t in range(3600)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_two_workers_and_two_attempts_have_one_bill(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--run-name", "one", "--grid-intensity", "360", "--energy-price", "3.6"]
    done = in_ranks(tmp_path, *flags, STORMO_ENERGY_TRACE=trace)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "one"
    first = summary(run)
    _assert_is_whole(run, first)
    assert first["energy_parts_j"]["recomputed"] == 0
    epochs = [event for event in read_events(run / "events.jsonl") if event["event"] == "epoch_done"]
    measured = [epoch for epoch in epochs if epoch["energy_j"] is not None]
    assert measured
    assert 0 < sum(epoch["energy_j"] for epoch in measured) < first["energy_j"]
    (attempt,) = _attempts(run / "nodes" / "0.jsonl")
    measured_s = attempt[-1]["time_unix_s"] - attempt[0]["time_unix_s"]
    assert 0 < sum(epoch["energy_j"] / epoch["power_w"] for epoch in measured) <= measured_s
    for worker in epochs[-1]["workers"]:
        assert 0 <= worker["input_wait_s"] + worker["exposed_s"] <= worker["train_time_s"]
    assert [(worker["rank"], worker["node"]) for worker in epochs[-1]["workers"]] == [(0, 0), (1, 0)]

    # On from the checkpoint before the last: what came after it was done again.
    older = checkpoints(run)[-2]
    again = in_ranks(tmp_path, "--resume", str(run / "checkpoints" / older), STORMO_ENERGY_TRACE=trace)
    assert again.returncode == 0, again.stderr
    second = summary(run)
    _assert_is_whole(run, second)
    assert second["energy_j"] > first["energy_j"]
    assert second["energy_parts_j"]["recomputed"] > 0
    bill = read_bill(run)
    assert [attempt.resumed_at_step for attempt in bill.attempts] == [None, int(older.removeprefix("step-"))]
    sentence = next(line for line in again.stdout.splitlines() if line.startswith("Energy: "))
    share = second["energy_parts_j"]["recomputed"] / second["energy_j"]
    assert ("recomputed" in sentence) is (share >= 0.005)  # less is not shown
    assert f"{second['co2e_g']:.3g} g CO2e, " in sentence

    monkeypatch.chdir(tmp_path)
    assert main(["show", "one"]) == 0
    shown = capsys.readouterr().out
    assert "recomputed" in shown
    assert "replayed from" in shown


def test_every_node_has_its_own_account_and_the_job_their_sum(tmp_path: Path, trace: str) -> None:
    shutil.copy(trace, tmp_path / "trace-0.jsonl")
    shutil.copy(trace, tmp_path / "trace-1.jsonl")
    words = ["-m", "stormo", "train", TASK, *SETTINGS, "--run-name", "one", "--num-gpus", "1", "--num-nodes", "2"]
    traces = str(tmp_path / "trace-{node_id}.jsonl")
    done = programs.run(words, tmp_path, 2, num_nodes=2, STORMO_ENERGY_TRACE=traces)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "one"
    ended = summary(run)
    assert sorted(path.name for path in (run / "nodes").iterdir()) == ["0.jsonl", "1.jsonl"]
    nodes = {node["node_id"]: node["energy_j"] for node in ended["energy_nodes"]}
    assert ended["energy_j"] == pytest.approx(nodes["0"] + nodes["1"])
    for node_id, drawn_j in nodes.items():
        assert drawn_j == pytest.approx(_drawn_j(run / "nodes" / f"{node_id}.jsonl"))
    assert math.fsum(ended["energy_parts_j"].values()) == ended["energy_j"]


def test_without_measuring_nothing_is_written_or_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("--run-name", "one", "--epochs", "1", "--no-energy") == 0
    run = tmp_path / "runs" / "one"
    assert not (run / "nodes").exists()
    assert summary(run)["energy_j"] is None
    assert summary(run)["energy_reasons"] == ["measuring was turned off (--no-energy)"]
    assert "Energy" not in capfd.readouterr().out


def _assert_is_whole(run: Path, ended: dict[str, Any]) -> None:
    """The parts are the whole, and the whole is what the counters of the recording showed."""
    assert math.fsum(ended["energy_parts_j"].values()) == ended["energy_j"]
    assert [path.name for path in (run / "nodes").iterdir()] == ["0.jsonl"]
    assert ended["energy_j"] == pytest.approx(_drawn_j(run / "nodes" / "0.jsonl"))
    assert ended["energy_kinds_j"]["gpu"] / ended["energy_kinds_j"]["cpu"] == pytest.approx(GPU_W / CPU_W)
    assert ended["energy_wh"] == pytest.approx(ended["energy_j"] / 3600)
    assert ended["co2e_g"] == pytest.approx(ended["energy_j"] / 3.6e6 * 360)
    assert ended["energy_cost"] == pytest.approx(ended["energy_j"] / 3.6e6 * 3.6)
    assert ended["energy_j_per_sample"] == pytest.approx(ended["energy_j"] / ended["samples_seen"])


def _attempts(path: Path) -> list[list[dict[str, Any]]]:
    """The lines of a node's file that have a reading, by attempt; the first is the start."""
    attempts: list[list[dict[str, Any]]] = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "start":
            attempts.append([])
        if line["kind"] in ("start", "energy"):
            attempts[-1].append(line)
    return attempts


def _drawn_j(path: Path) -> float:
    """What all attempts of a node drew, which is the recording's power over its time.

    However busy the machine is, a reading is taken after the line before it was made and before its own line is.
    """
    total_j = 0.0
    for start, first, *lines in _attempts(path):
        before, last = lines[-2:]
        first_j, last_j = (sum(line["joules"].values()) for line in (first, last))
        least_j, most_j = (POWER_W * (line["time_unix_s"] - start["time_unix_s"]) for line in (before, last))
        slack_j = 1e-3 * most_j  # the recording runs by the wall clock, the lines by one that never jumps
        assert least_j - slack_j <= last_j
        assert last_j - first_j <= most_j + slack_j
        total_j += last_j
    return total_j
