"""The key of a user's jobs: made once, private, and never taken from anybody else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.launch.secret import VARIABLE, job_secret, new_secret

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def key_file(home: dict[str, str]) -> Path:
    return Path(home["HOME"]) / ".config" / "stormo" / "secret"


def test_the_first_job_makes_a_key_that_only_its_user_can_read(home: dict[str, str]) -> None:
    first = job_secret(home, 29600)
    assert key_file(home).stat().st_mode & 0o777 == 0o600
    assert key_file(home).parent.stat().st_mode & 0o777 == 0o700
    assert list(key_file(home).parent.iterdir()) == [key_file(home)]
    assert job_secret(home, 29600) == first
    assert job_secret(home, 29601) != first


def test_ranks_that_start_together_get_the_same_key(home: dict[str, str]) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(job_secret(home, 1))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_a_secret_of_the_users_own_needs_no_home(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), VARIABLE: new_secret()}
    assert job_secret(environ, 1) == job_secret({VARIABLE: environ[VARIABLE]}, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "short", "x" * 15])
def test_a_secret_that_could_be_guessed_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="could be guessed"):
        job_secret({VARIABLE: text}, 1)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        _link,
        _fifo,
        lambda file: file.chmod(0o640),
        lambda file: file.write_bytes(b"short"),
        lambda file: file.write_bytes(b"x" * 33),
        pytest.param(
            lambda file: os.chown(file, NOBODY, NOBODY),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
    ids=["link", "fifo", "readable", "short", "long", "another user's"],
)
def test_a_key_that_others_may_have_made_or_read_is_refused(home: dict[str, str], spoil: object) -> None:
    job_secret(home, 1)
    assert callable(spoil)
    spoil(key_file(home))
    with pytest.raises(SettingError, match=VARIABLE):
        job_secret(home, 1)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], Path]:
    (tmp_path / "file").touch()  # no folder can be made below it, whoever this is
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"HOME": str(tmp_path / "file")}, tmp_path / f"stormo-{os.geteuid()}"


def test_without_a_home_the_key_lies_in_a_private_folder_of_this_host(homeless: tuple[dict[str, str], Path]) -> None:
    environ, folder = homeless
    assert job_secret(environ, 1) == job_secret(environ, 1)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_somebody_else_has_made_first_is_refused(homeless: tuple[dict[str, str], Path]) -> None:
    environ, folder = homeless
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(SettingError, match="no folder of this user"):
        job_secret(environ, 1)
