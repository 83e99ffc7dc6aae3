"""`--prometheus` and `--profile` on the command line: what a run shows while it goes on, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stormo.profiling.ranges import has_nvtx
from stormo.telemetry.events import read_events
from tests.commands.test_train import here


def test_a_run_says_where_it_is_shown_and_records_the_steps_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("--run-name", "one", "--epochs", "1", "--prometheus", "0", "--profile", "2:4") == 0
    out, err = capfd.readouterr()
    assert err == ""  # nothing of the profiler's own, either
    assert "Prometheus finds this run at http://127.0.0.1:" in out
    assert "Profile of steps 2 to 3, 1 worker, by CPU time: " in out
    run = tmp_path / "runs" / "one"
    assert {path.name for path in (run / "profile").iterdir()} == {"rank-0.pt.trace.json.gz", "summary.json"}
    notices = [event for event in read_events(run / "events.jsonl") if event["event"] == "notice"]
    assert any(notice["text"].endswith("/metrics") for notice in notices)
    assert [notice["after_step"] for notice in notices if notice["text"].startswith("Profile of ")] == [3]


def test_a_port_that_is_taken_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert here("--run-name", "one", "--prometheus", str(port)) == 2
    assert f"stormo: --prometheus {port} was set, but 127.0.0.1:{port} cannot" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(has_nvtx(), reason="this torch has NVTX")
def test_nvtx_that_is_not_there_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("--run-name", "one", "--profile", "nvtx") == 2
    assert "stormo: --profile nvtx was set, but torch " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
