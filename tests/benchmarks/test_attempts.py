"""Finding and ending the processes of an attempt."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.attempts import MARK, kill_all, marked, wait_until_gone, workers_of

# An agent with two workers, of which each has a helper that inherits everything.
_AGENT = """
import os, subprocess, sys, time
helper = "import time; time.sleep(60)"
worker = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {helper!r}]); time.sleep(60)"
for rank in range(2):
    subprocess.Popen([sys.executable, "-c", worker], env=dict(os.environ, RANK=str(rank)))
print("ready", flush=True)
time.sleep(60)
"""


def test_marked_processes_are_found_by_rank_and_after_their_agent_is_gone() -> None:
    mark = f"test-{os.getpid()}"
    agent = subprocess.Popen([sys.executable, "-c", _AGENT], env=os.environ | {MARK: mark}, stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        while len(marked(mark)) < 5:
            assert agent.poll() is None
        workers = workers_of(agent.pid, mark)
        assert sorted(workers) == [0, 1]
        kill_all([agent.pid])
        agent.wait()
        assert len(wait_until_gone(mark, 0.1)) == 4
        kill_all(marked(mark))
        assert wait_until_gone(mark, 10.0) == set()
        kill_all(workers.values())
    finally:
        kill_all(marked(mark))
        agent.communicate()
