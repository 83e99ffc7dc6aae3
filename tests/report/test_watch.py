from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import SettingError
from stormo.report import watch
from stormo.telemetry.folder import RunFolder
from tests.report.made_run import MadeRun, append


class Served:
    """A server in a thread, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = watch.Server(RunFolder(folder), "127.0.0.1", 0)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=30)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def data(self, version: str = "") -> tuple[int, Any]:
        answer = self.get(f"/data?token={self.server.token}&version={version}")
        body = answer.body  # type: ignore[attr-defined]
        return answer.status, json.loads(body) if body else None

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "made").mkdir()
    one = Served(tmp_path / "made")
    yield one
    one.close()


def test_nothing_is_shown_without_the_token(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    token = served.server.token
    for path in ("/", "/data", "/?token=", f"/?token={token[:-1]}", f"/data?token={token}x", "/?token=%C3%A9", "/x"):
        answer = served.get(path)
        assert answer.status == 403, path
        assert b"made" not in answer.body  # type: ignore[attr-defined]
    assert served.get(f"/?token={token}").status == 200
    assert served.get(f"/../secrets?token={token}").status == 404
    assert served.get(f"//[?token={token}").status == 404
    assert served.get(f"/?token={token}").headers["Referrer-Policy"] == "no-referrer"
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "a log of requests would hold the token"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("[::1]:1234", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("[", 403),
    ],
)
def test_a_foreign_name_that_leads_here_is_refused(served: Served, host: str, status: int) -> None:
    assert served.get(f"/data?token={served.server.token}", Host=host).status == status


def test_the_data_grow_with_the_run_until_it_ends(served: Served) -> None:
    status, first = served.data()
    assert (status, first["runs"][0]["state"]) == (200, "waiting")
    made = MadeRun(epochs=1)
    append(served.folder / "events.jsonl", list(made.events())[:5])
    status, second = served.data(first["version"])
    assert status == 200
    assert len(second["panels"][0]["charts"][0]["series"][0]["y"]) == 4
    append(served.folder / "events.jsonl", list(made.events())[5:])
    (served.folder / "summary.json").write_text(json.dumps(made.summary()))
    status, third = served.data(second["version"])
    assert (status, third["runs"][0]["state"]) == (200, "done")
    assert len(third["panels"][0]["charts"][0]["series"][0]["y"]) == 20
    # Asked again with nothing new, it sends nothing; the version also changes with the minute.
    assert (204, None) in [served.data(served.data()[1]["version"]) for _ in range(2)]


def test_a_damaged_file_is_told_and_the_server_goes_on(served: Served) -> None:
    events = served.folder / "events.jsonl"
    events.write_text("broken\n")
    answer = served.get(f"/data?token={served.server.token}")
    assert (answer.status, b"was damaged" in answer.body) == (500, True)  # type: ignore[attr-defined]
    events.unlink()
    assert served.data()[0] == 200


def test_the_command_waits_says_where_and_ends_with_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: watch.Server, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.Server, "serve_forever", interrupt)
    assert watch.main(["new", "--runs-folder", str(tmp_path), "--wait"]) == 0
    out = capsys.readouterr().out
    assert "holds no run yet: the page waits" in out
    assert "new is shown at http://127.0.0.1:" in out
    assert watch.main(["new", "--runs-folder", str(tmp_path), "--wait", "--host", "0.0.0.0"]) == 0
    assert "open to the network" in capsys.readouterr().out
    for number, name in enumerate(("older", "newer")):
        event = {"event": "run_started", "time_unix_s": 1000.0 + number}
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert watch.main(["--runs-folder", str(tmp_path)]) == 0
    assert "newer is shown at http://127.0.0.1:" in capsys.readouterr().out


def test_errors_are_one_sentence(served: Served, tmp_path: Path) -> None:
    place = ["made", "--runs-folder", str(tmp_path)]
    with pytest.raises(
        SettingError, match=r"--port \d+ was set, but nothing can listen there \(Address already in use\)"
    ):
        watch.main([*place, "--port", str(served.server.server_address[1])])
    for port in ("70000", "-1", "x"):
        with pytest.raises(SettingError, match="from 0 to 65535"):
            watch.main([*place, f"--port={port}"])
    with pytest.raises(SettingError, match=r"--host 192\.0\.2\.1 was set"):
        watch.main([*place, "--host", "192.0.2.1"])
    with pytest.raises(SettingError, match=r"--host a\.\.b was set, but that is not the name of a host"):
        watch.main([*place, "--host", "a..b"])
    with pytest.raises(SettingError, match="an empty name was given"):
        watch.main(["", "--wait", "--runs-folder", str(tmp_path)])
    with pytest.raises(SettingError, match="there is no run in"):
        watch.main(["--runs-folder", str(tmp_path / "empty")])
    with pytest.raises(SettingError, match="run 'absent' was asked for"):
        watch.main(["absent", "--runs-folder", str(tmp_path)])
