"""The attackers of the benchmark are real ones: against something careless they get in, and are seen to."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from benchmarks.hostile import intruder
from benchmarks.hostile.peers import _job, _leaked, _refused


def test_a_planted_pickle_leaves_its_mark_where_it_is_run(tmp_path: Path) -> None:
    pickle.loads(intruder.planted(str(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_an_open_store_is_written_to() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert intruder.write_to_store([("127.0.0.1", store.port)], {"stormo/world/a": b"mine"}) == 1
    assert dist.PrefixStore("world", dist.PrefixStore("stormo", store)).get("a") == b"mine"


def test_a_channel_that_talks_to_anybody_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as careless:

        def welcome() -> None:
            connected = careless.accept()[0]
            connected.sendall(b'{"type":"welcome"}\n')
            connected.recv(1000)
            connected.sendall(b'{"type":"refuse","sentence":"--lr is 0.1"}\n')
            connected.close()

        thread = threading.Thread(target=welcome)
        thread.start()
        heard = intruder.send(careless.getsockname(), b"{}\n")
        thread.join()
    assert _leaked(heard)
    assert not _leaked('{"type":"challenge"}\n{"type":"unauthenticated"}\n')


_CARELESS = """
import os, pathlib, time
progress = pathlib.Path(os.environ["HOSTILE_PROGRESS"])
for _ in range(2000):
    with progress.open("a") as file:
        file.write("." * 3)
    time.sleep(0.02)
"""


def test_what_an_attacker_brings_about_is_judged(tmp_path: Path) -> None:
    with _job(tmp_path, [[sys.executable, "-c", _CARELESS]]) as job:
        job.suffers("nothing", lambda: None)
        job.suffers("code", job.marker.touch)
        job.suffers("a secret", lambda: "it leaked")
        job.suffers("removal", job.precious.rmdir)
        job.suffers("an end", lambda: (job.processes[0].kill(), job.processes[0].wait())[:0])
    calm, code, leak, removal, end = job.verdicts
    assert not any((calm.code_run, calm.deleted, calm.job_ended, calm.hang, calm.wrongly_accepted))
    assert code.code_run
    assert leak.wrongly_accepted
    assert removal.deleted
    assert end.job_ended


def test_a_job_that_is_to_refuse_must_name_a_remedy(tmp_path: Path) -> None:
    says = [sys.executable, "-c", "import sys; print('stormo: a was set, but b; set --c.'); sys.exit(2)"]
    assert not _refused(tmp_path, "case", says, "--c").wrongly_accepted
    assert _refused(tmp_path, "case", says, "--d").wrongly_accepted
    assert _refused(tmp_path, "case", [sys.executable, "-c", ""], "").wrongly_accepted
    assert _refused(tmp_path, "case", [sys.executable, "-c", "raise ValueError"], "").traceback


def test_the_attacker_cannot_open_what_is_private() -> None:
    if os.geteuid() != 0:
        return
    code = "from benchmarks.hostile import intruder; import json; intruder.become(); "
    code += f"print(json.dumps(intruder.open_private([{os.getpid()}], ['environ'])))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
    assert intruder.open_private([os.getpid()], ["environ"])
