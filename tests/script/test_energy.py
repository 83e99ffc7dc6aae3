"""The energy of a script: every node measures itself once, all workers are told the sum, and it is said at the end."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.distributed.world import World as Workers
from stormo.energy import read_bill
from stormo.energy.node_recorder import NoNodeRecorder
from stormo.errors import SettingError
from stormo.launch.failure_reporter import FailureReporter
from stormo.script.energy import StartRecorder, add_up
from tests import programs
from tests.script.loops import Ranks, world_of

GPU_W, CPU_W = 400.0, 90.0
SCRIPT = """
import sys
import time

import stormo

world = stormo.World(energy="--off" not in sys.argv)
if "--off" not in sys.argv:
    times = [time.time()]
    first = world.energy()
    times.append(time.time())
    time.sleep(0.2)
    times.append(time.time())
    between = world.energy() - first
    times.append(time.time())
    world.print(between.joules, between.num_nodes, times[2] - times[1], times[3] - times[0])
"""


@pytest.fixture
def traces(tmp_path: Path) -> str:
    """Recordings of constant power for two nodes."""
    common = {"method": "counter", "resolution_j": 0.001, "interval_s": 0.001}
    sources = [
        {"id": "GPU-a", "kind": "gpu", "name": "a GPU"} | common,
        {"id": "cpu", "kind": "cpu", "name": "a CPU"} | common,
    ]
    lines: list[dict[str, Any]] = [{"sources": sources, "origin_unix_s": time.time()}]
    lines += [{"time_s": t, "raw": {"GPU-a": GPU_W * t, "cpu": CPU_W * t}} for t in range(3600)]
    for node in range(2):
        (tmp_path / f"trace-{node}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "trace-{node_id}.jsonl")


@pytest.mark.parametrize(("num_workers", "num_nodes"), [(1, 1), (2, 2)])
def test_the_script_asks_for_it_and_it_is_printed_at_the_end(
    tmp_path: Path, traces: str, num_workers: int, num_nodes: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = programs.run([str(script)], tmp_path, num_workers, num_nodes, STORMO_ENERGY_TRACE=traces)
    assert done.returncode == 0, done.stderr
    joules, nodes, least_s, most_s = map(float, done.stdout.splitlines()[0].split())
    assert nodes == num_nodes
    # Each reading is taken while it is asked for; however many workers, a node counts once.
    power_w = num_nodes * (GPU_W + CPU_W)
    assert power_w * least_s * 0.999 <= joules <= power_w * most_s * 1.001
    (line,) = [line for line in done.stderr.splitlines() if "Energy" in line]
    where = r", on 2 nodes\." if num_nodes == 2 else r"\."
    assert re.fullmatch(rf"Energy: \S+ k?J ± \S+ J = \S+ Wh \(GPUs \S+ k?J, CPUs \S+ k?J\) in \S+ s{where}", line), line


STARTED_AGAIN = """
import os
import signal
import sys
import time

import torch

import stormo

world = stormo.World()
model, optimizer = (model := torch.nn.Linear(2, 1)), torch.optim.SGD(model.parameters(), lr=0.1)
world.wrap(model, optimizer)
loader = world.loader(torch.randn(40, 2), global_batch_size=4)
world.load("checkpoints")
for number, x in enumerate(loader, 1):
    world.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if number == 3 or sys.argv[1] == "resumed":
        world.save("checkpoints")
    if sys.argv[1] == "killed" and number == 6:
        time.sleep(2)  # a line of its file has told of these steps
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_starts_of_a_script_are_one_bill(tmp_path: Path, traces: str) -> None:
    num_nodes = 2
    script = tmp_path / "script.py"
    script.write_text(STARTED_AGAIN)

    def start(how: str) -> str:
        return programs.run([str(script), how], tmp_path, num_nodes, num_nodes, STORMO_ENERGY_TRACE=traces).stderr

    assert "Energy" not in start("killed")
    first = read_bill(tmp_path / "checkpoints")
    assert [attempt.is_ended for attempt in first.attempts] == [False]
    output = start("resumed")
    own, over_all = [line for line in output.splitlines() if "starts" in line or "Energy" in line]
    second = read_bill(tmp_path / "checkpoints")
    assert [(one.resumed_at_step, one.num_nodes, len(one.node_ids)) for one in second.attempts] == [
        (None, num_nodes, num_nodes),
        (3, num_nodes, num_nodes),
    ]
    assert first.total_j is not None
    assert second.total_j is not None
    assert second.total_j > first.total_j
    assert first.parts_j["recomputed"] == 0
    # The killed start went on for two seconds and more behind its only checkpoint.
    assert second.parts_j["recomputed"] > num_nodes * (GPU_W + CPU_W) * 1.0
    assert own.startswith("Energy: ")
    form = r"Over all 2 starts: \S+ k?J ± \S+ J = \S+ Wh \(GPUs \S+ k?J, CPUs \S+ k?J\), \d+ % of it for "
    assert re.fullmatch(form + r"recomputed work\.", over_all), over_all


def test_a_start_is_counted_where_it_resumes_from(tmp_path: Path) -> None:
    attached: list[tuple[Path, int | None]] = []
    recorder = NoNodeRecorder()
    recorder.attach = lambda path, resumed, step: attached.append((path, resumed))  # type: ignore[method-assign]
    best, last, other = (tmp_path / name for name in ("best", "last", "other"))
    for folder in (best, last, other):
        folder.mkdir()

    def start(loads: Path | None, *saves: Path) -> None:
        starts = StartRecorder(recorder, 3)
        if loads is not None:
            starts.loaded(loads, 7)
        for folder in saves:
            with starts.saving(folder, 9):
                pass

    start(None, best, last)
    start(last, best, last, best)
    start(last, other, other)  # trained on elsewhere
    nodes = Path("nodes") / "3.jsonl"
    assert attached == [(best / nodes, None), (last / nodes, 7), (other / nodes, None)]


def test_nothing_is_said_where_it_is_off_or_cannot_be_read(tmp_path: Path, traces: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = programs.run([str(script), "--off"], tmp_path, STORMO_ENERGY_TRACE=traces)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    script.write_text(
        "import stormo\nworld = stormo.World()\nworld._meter._meter.sources = ()\nprint(world.energy())\n"
    )
    done = programs.run([str(script)], tmp_path, STORMO_ENERGY_TRACE=traces)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Energy: replayed from ")
    assert done.stderr == ""


def _ask(workers: Workers, traces: str) -> tuple[Any, str]:
    os.environ["STORMO_ENERGY_TRACE"] = traces
    world = world_of(workers)
    with pytest.raises(SettingError, match="measures nothing") as refused:
        world.energy()
    world._set_up(workers, FailureReporter(), energy=True)
    found = world.energy()
    del os.environ["STORMO_ENERGY_TRACE"]
    return (found.joules, found.seconds, found.num_nodes, found.reasons), str(refused.value)


def test_all_workers_get_the_same(run_ranks: Ranks, traces: str) -> None:
    (first, sentence), (second, _) = run_ranks(_ask, 2, traces)
    assert first == second
    assert first[0] > 0
    assert "World(energy=False)" in sentence


def test_nodes_are_added_up_and_one_device_counts_once() -> None:
    def reading(node: str, machine: str, *sources: tuple[str, str, float, float]) -> dict[str, Any]:
        return {"node": node, "machine": machine, "seconds": 10.0, "sources": [*map(list, sources)], "reasons": ["why"]}

    gpu, cpu = ("GPU-a", "gpu", 100.0, 1.0), ("cpu", "cpu", 40.0, 2.0)
    nodes = [reading("0", "m", gpu, cpu), reading("1", "m", ("GPU-b", "gpu", 50.0, 1.0), ("cpu", "cpu", 41.0, 2.0))]
    total = add_up(nodes, ["0", "1", "2"])
    assert (total.joules, total.error_j, total.num_nodes, total.num_silent) == (191.0, 4.0, 2, 1)
    assert total.kinds_j == {"gpu": 150.0, "cpu": 41.0}
    assert total.reasons == (
        "cpu is one device that nodes 0, 1 have read: it is counted once, at node 1",
        "node 0: why",
        "node 1: why",
        "node 2 did not report its energy",
    )
    assert str(total) == (
        "Energy: 191 J ± 4 J = 0.0531 Wh (GPUs 150 J, CPUs 41 J) in 10 s, on 2 of 3 nodes: the others did not report."
    )
    apart = add_up([reading("0", "m", gpu), reading("1", "n", gpu)], ["0", "1"])
    assert apart.joules == 200.0
    between = total - add_up(nodes[:1], ["0"])
    assert (between.joules, between.error_j, between.seconds) == (51.0, 7.0, 0.0)
    assert str(add_up([reading("0", "m")], ["0"])) == "Energy: why."
    assert (add_up([reading("0", "m")], ["0"]) - total).joules is None
