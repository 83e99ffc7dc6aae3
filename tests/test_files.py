"""Files that another account may have prepared: nothing hangs, fills the memory or leads elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, TypedDict

import pytest

from stormo.config.toml import require_secrets
from stormo.errors import SettingError
from stormo.system.files import (
    MASK,
    MAX_LINE_BYTES,
    BadFileError,
    Fields,
    LineFile,
    create,
    fits,
    is_secret_name,
    keep_compiled,
    open_own,
    open_to_append,
    parse_json,
    printable,
    read_bytes,
    read_lines,
    read_object,
    read_toml,
)
from stormo.telemetry.environment import mask_secrets
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder, write_whole
from stormo.training.run_folder import lock_folder


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "sparse", "device"])
def test_only_a_regular_file_of_a_bounded_size_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    (tmp_path / "other").write_bytes(b"{}")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(BadFileError):
        read_bytes(path, 1000)
    with pytest.raises(BadFileError):
        list(read_lines(path))
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent", 1000)


def test_a_line_longer_than_any_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\n" + b"b" * (MAX_LINE_BYTES + 1))
    lines = read_lines(tmp_path / "lines")
    assert next(lines) == b"a\n"
    with pytest.raises(BadFileError):
        next(lines)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[" * 40 + b"]" * 40, b"9" * 4000, b"9" * 20, b"NaN", b"\xff", b"", b'{"a": -Infinity}']
)
def test_json_beyond_all_records_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


def test_a_figure_that_is_too_large_counts_as_not_measured() -> None:
    assert parse_json(b"[1e999, -1e300, 1e99, 123456789012345678, 0.12345678901234567890]") == [
        *(None, None, 1e99, 123456789012345678, 0.12345678901234567890)
    ]


@pytest.mark.parametrize("data", [b"a" + b".a" * 60_000 + b" = 1", b"a = " + b"[" * 9999, b"a = " + b"9" * 4000])
def test_toml_beyond_all_settings_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(data)
    with pytest.raises(ValueError, match=r"."):
        read_toml(tmp_path / "config.toml")


class _Shape(TypedDict):
    a: int


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True), (True, int, False), (1.0, int, False), (1, float, True), (True, float, False),
        ("a", str, True), (None, float | None, True), ([1, 2], list[int], True), ([1, "a"], tuple[int, ...], False),
        ({"a": 1}, _Shape, True), ({"b": 1}, _Shape, False), ({"a": "x"}, _Shape, False), ([1], _Shape, False),
        ({"x": 1.5}, dict[str, float], True), ({"x": "y"}, dict[str, float], False), ("any", Any, True),
    ],
)  # fmt: skip
def test_values_are_held_against_their_hints(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) is expected


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"steps": "\\u001b[31m", "unknown": []}')
    with pytest.raises(BadFileError) as caught:
        read_object(tmp_path / "x.json", Fields({"steps": int}))
    assert "steps" in str(caught.value)
    assert "\x1b" not in printable(str(caught.value))


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_nothing_is_written_through_what_somebody_else_has_put_there(tmp_path: Path, kind: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text("precious")
    for name in ("file", ".lock", "events.jsonl", "nodes.jsonl"):
        if kind == "link":
            (tmp_path / name).symlink_to(precious)
        elif kind == "hard link":
            (tmp_path / name).hardlink_to(precious)
        else:
            os.mkfifo(tmp_path / name)
    with pytest.raises(BadFileError):
        open_own(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(BadFileError):
        open_to_append(path)
    with pytest.raises(BadFileError):
        lock_folder(RunFolder(tmp_path))
    with pytest.raises(BadFileError):
        EventFile(RunFolder(tmp_path))
    with pytest.raises(OSError, match=r"nodes\.jsonl"):
        LineFile(tmp_path / "nodes.jsonl").append([{}])
    write_whole(path, "new")  # in its place, not through it
    assert (path.read_text(), precious.read_text()) == ("new", "precious")
    create(tmp_path / ".lock").close()
    assert precious.read_text() == "precious"


def test_files_are_as_open_as_their_folder(tmp_path: Path) -> None:
    for mode in (0o700, 0o750, 0o755):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        write_whole(folder / "a", "")
        open_to_append(folder / "b").close()
        for name in ("a", "b"):
            assert stat.S_IMODE((folder / name).stat().st_mode) & ~mode & 0o077 == 0


def test_a_torn_line_of_any_length_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 200_000)
    file = LineFile(path)
    file.append([{"a": 2}])
    file.close()
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    "name",
    [
        *("--pass", "--pw", "--authToken", "hub_token", "DB_PASSWORD", "apiKey", "--task.pwd", "--task.key", "db_pass"),
        *(
            "HFToken",
            "DBPassword",
            "access_tokens",
            "secrets",
            "PGPASSWORD",
            "accesskey",
            "GH_PAT",
            "passwd",
            "authkey",
        ),
        *("AWS_SECRET_ACCESS_KEY", "ssh-keys", "userCredentials", "wandb_key", "HTTPAuth"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert mask_secrets([f"{name}=geheim"]) == [f"{name}={MASK}"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "--tokenizer",
            "tokenization",
            "max_new_tokens",
            "num-tokens",
            "tokensPerBatch",
            "passes",
            "samples_per_pass",
        ),
        *("keys", "sort_key", "labelKey", "monkey", "compass", "path", "author", "width"),
    ],
)
def test_names_of_none(name: str) -> None:
    assert not is_secret_name(name)


def test_a_secret_that_was_not_written_must_be_given_again() -> None:
    document = {"task_options": {"hub_token": MASK, "width": 3}}
    with pytest.raises(SettingError, match=r"--task\.hub-token"):
        require_secrets(document, (), "config.toml")
    require_secrets(document, ("task.hub_token",), "config.toml")


def test_what_torch_compiles_lies_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environ)
    folder = Path(environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path(environ["TRITON_CACHE_DIR"]).parent == folder
    own = {"TORCHINDUCTOR_CACHE_DIR": "a", "TRITON_CACHE_DIR": "b"}
    keep_compiled(own)
    assert own == {"TORCHINDUCTOR_CACHE_DIR": "a", "TRITON_CACHE_DIR": "b"}
    folder.chmod(0o777)
    with pytest.raises(SettingError, match="TORCHINDUCTOR_CACHE_DIR"):
        keep_compiled({"XDG_CACHE_HOME": str(tmp_path)})
