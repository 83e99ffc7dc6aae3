"""Files that another account may have prepared: opened without following links, read up to a limit, checked by type.

A run folder may come from another user. Nothing in it may hang a command (a pipe), fill its memory (a sparse file, a
number of 4000 digits), lead it elsewhere (a link) or surprise it (a text where a number belongs).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import secrets
import stat
import types
import typing
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from stormo.errors import EXIT_USAGE, SettingError, StormoError

MAX_JSON_BYTES = 16 << 20
MAX_TOML_BYTES = 128 << 10
MAX_RECORDS_BYTES = 2 << 30  # of a file that grows by a line at a time
MAX_LINE_BYTES = MAX_JSON_BYTES
LARGEST_FLOAT = 1e100  # a figure beyond it is none: sums and products of figures stay finite
_MAX_INT_BITS = 63
_MAX_DEPTH = 32
_UNUSUAL = re.compile(rb"\d{18}|[eE]\+?\d{3}|NaN|Infinity")
_MAX_KEY_PARTS = 200
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class BadFileError(StormoError, OSError):
    """A file that is not what was written there, or not one to be read or written: which, and why."""

    exit_code = EXIT_USAGE

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}.")
        self.problem = problem


def printable(text: str) -> str:
    """The text without control characters, direction marks and surrogates, which could steer a terminal."""
    return _CONTROL.sub("?", text)


def open_to_read(path: Path, max_bytes: int, *, follow: bool = False) -> BinaryIO:
    """A regular file of at most so many bytes; `follow` is for a path that the user has typed."""
    # O_NONBLOCK: a pipe in the place of a file would keep `open` waiting for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = open(os.open(path, flags), "rb")  # noqa: PTH123, SIM115 - a descriptor, which the caller closes
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        problem = "it is a symbolic link" if is_link else f"it cannot be read ({error.strerror})"
        raise BadFileError(path, problem) from None
    status = os.fstat(file.fileno())
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif status.st_size > max_bytes:
        problem = f"it is {status.st_size:,} bytes long, of which {max_bytes:,} are allowed"
    if problem:
        file.close()
        raise BadFileError(path, problem)
    return file


def read_bytes(path: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """The content of a file of at most so many bytes."""
    with open_to_read(path, max_bytes, follow=follow) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # it has grown since
        raise BadFileError(path, f"it is longer than the {max_bytes:,} bytes that are allowed")
    return data


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of records; the last one may lack its end."""
    with open_to_read(path, MAX_RECORDS_BYTES) as file:
        yield from lines_of(file, path)


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines from here on, none of them longer than any record is."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise BadFileError(path, f"it has a line of more than {MAX_LINE_BYTES:,} bytes")
        yield line


def parse_json(data: bytes) -> Any:
    """The JSON value; `ValueError` says what is wrong with it. A figure that is too large counts as not measured."""
    try:
        # The hooks are slow, and hardly any line needs them.
        if _UNUSUAL.search(data):
            value = json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_refuse)
        else:
            value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not valid UTF-8") from None
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH:
        _check_depth(value)
    return value


def read_object(path: Path, fields: Fields | None = None, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object of a JSON file, the type of each of its known fields checked."""
    try:
        value = parse_json(read_bytes(path, max_bytes))
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__} where an object belongs")
        if fields is not None:
            fields.check(value)
    except ValueError as error:
        raise BadFileError(path, f"it is not what was written there ({error})") from None
    return value


def read_toml(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """The document of a TOML file; `ValueError` says what is wrong with it."""
    import tomllib

    data = read_bytes(path, MAX_TOML_BYTES, follow=follow)
    # The parser's time and memory grow with the square of the parts of a key.
    if any(part.count(b".") > _MAX_KEY_PARTS for part in re.split(rb"[\n=,]", data)):
        raise ValueError("it has a key of hundreds of parts")
    try:
        document = tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(document)
    return document


class Fields:
    """The fields that an object of a file may have, by name and type."""

    def __init__(self, hints: Mapping[str, Any]) -> None:
        self.hints = dict(hints)
        # Most are of one plain type, which is asked for millions of lines.
        self._plain = {key: found for key, hint in hints.items() if (found := _plain_types(hint))}

    def check(self, value: Mapping[str, Any]) -> None:
        """Refuse an object with a field of another type; `ValueError` names it. What is absent is fine."""
        plain = self._plain
        for key, content in value.items():
            if key in plain:
                is_right = type(content) in plain[key]
            else:
                is_right = key not in self.hints or fits(content, self.hints[key])
            if not is_right:
                shown = printable(repr(content)[:40])
                raise ValueError(f"{printable(key)} is {shown}, where {_in_words(self.hints[key])} belongs")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the type that the hint names; a whole number is a float too, true is none."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if plain := _plain_types(hint):
        return type(value) in plain
    if kind in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        known, required = _hints(kind), getattr(kind, "__required_keys__", ())
        is_whole = isinstance(value, Mapping) and all(key in value for key in required)
        is_whole = is_whole and (typing.is_typeddict(kind) or value.keys() <= known.keys())
        return is_whole and all(fits(value[key], one) for key, one in known.items() if key in value)
    if kind is not Any:
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values())
    return True


def open_to_append(path: Path) -> FileIO:
    """A file of the user's own that is written on at its end, not buffered; made where it is not there."""
    return open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def write_all(file: FileIO, data: bytes) -> None:
    """Hand all of it to the system, which survives a kill of this process."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def whole_lines_bytes(file: FileIO) -> int:
    """How many bytes of a file are whole lines: what follows was cut short by a kill or a full disk."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        end, start = start, max(0, start - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


class LineFile:
    """A file of JSON lines with one writer, opened with the first lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._size_bytes: int | None = None  # of the lines that were written whole

    def append(self, lines: Sequence[Mapping[str, Any]], *, sync: bool = False) -> None:
        """Write the lines, with `sync` to the disk; after an `OSError` none is written, and they may come again."""
        # Whatever a sensor gives is written, as text if need be.
        data = b"".join(json.dumps(line, allow_nan=False, default=str).encode() + b"\n" for line in lines)
        try:
            if self._file is None:
                self._file = self._open()
            write_all(self._file, data)
            if sync:
                os.fsync(self._file.fileno())
        except OSError:
            self.close()
            raise
        self._size_bytes = (self._size_bytes or 0) + len(data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        opened = open_to_append(self.path)
        try:
            if self._size_bytes is None:
                self._size_bytes = whole_lines_bytes(opened)
            opened.truncate(self._size_bytes)
        except OSError:
            opened.close()
            raise
        return opened


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    except OSError as error:
        # Some network and user-space file systems need no such call, and refuse it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder_fd)


def open_own(path: Path, flags: int) -> FileIO:
    """Open a regular file of this user or of the folder's owner; a new one has the rights of its folder."""
    folder = path.parent.stat()
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folder.st_mode & 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a symbolic link" if error.errno == errno.ELOOP else "not a regular file"
        raise BadFileError(path, f"it is {what}, and nothing is written through it") from None
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif status.st_nlink > 1:
        problem = "it has a second name (a hard link), and what is behind that would be written too"
    elif status.st_uid not in (os.geteuid(), folder.st_uid):
        problem = "it belongs to another account"
    if problem:
        os.close(descriptor)
        raise BadFileError(path, problem)
    return open(descriptor, "r+b" if flags & os.O_RDWR else "wb", buffering=0)  # noqa: PTH123


def create(path: Path) -> FileIO:
    """A new file in the place of whatever had that name, which is removed and not written through."""
    path.unlink(missing_ok=True)
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def make_folder(path: Path) -> None:
    """Make a folder inside another: as open as that one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=path.parent.stat().st_mode & 0o777, exist_ok=True)


def temporary_name(path: Path) -> Path:
    """A name beside a file that cannot be guessed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_own(path: Path) -> bool:
    """Whether a file or folder belongs to the user of this process."""
    return path.stat().st_uid == os.geteuid()


def private_folder(path: Path) -> Path:
    """A folder that only this user can write to, created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BadFileError(path, "it is no folder of yours alone: others could put files there that are run")
    return path


def _plain_types(hint: Any) -> frozenset[type]:
    """The JSON types of a hint; none for a container."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not all(kind in (int, float, str, bool, types.NoneType) for kind in kinds):
        return frozenset()
    return frozenset({*kinds, int} if float in kinds else kinds)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _int(text: str) -> int:
    if len(text) > 20 or (value := int(text)).bit_length() > _MAX_INT_BITS:
        raise ValueError(f"the number {text[:12]}… has {len(text)} digits")
    return value


def _float(text: str) -> float | None:
    value = float(text)
    return value if abs(value) <= LARGEST_FLOAT else None


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _check_depth(value: Any) -> None:
    """Refuse what is nested too deeply to be walked, and a whole number beyond all counts."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif type(one) is int and one.bit_length() > _MAX_INT_BITS:
                raise ValueError("it has a whole number beyond all counts")
        level = [one for one in inner if isinstance(one, dict | list) or type(one) is int]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _in_words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"}
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(hint))
    return names.get(kind, "a list" if kind in (list, tuple) else "an object")


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Have torch.compile keep its code in a private folder, unless the user has named one.

    Torch's default lies in /tmp, where any user may create it first, and its files are loaded as code.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in environ and "TRITON_CACHE_DIR" in environ:
        return
    home = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else Path("~/.cache")
    try:
        folder = private_folder(home.expanduser() / "stormo-compiled")
    except OSError as error:
        why = error.problem if isinstance(error, BadFileError) else str(error.strerror)
        raise SettingError(
            f"{home}/stormo-compiled was to keep what torch.compile makes",
            why,
            "set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to folders of your own",
        ) from None
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def data_cache(environ: Mapping[str, str]) -> Path:
    """The folder of downloaded data, which may begin with ~: $STORMO_DATA, or stormo's in the user's cache."""
    if environ.get("STORMO_DATA"):
        return Path(environ["STORMO_DATA"])
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) / "stormo" if cache else Path("~/.cache/stormo")


MASK = "***"
# Long words count anywhere, short ones as whole words; a key is a secret only where its name says of what.
_SECRET = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential"
    r"|(?<!num )(?<!max )(?<!min )(?<!new )token(?!i[sz]|s per\b)"
    r"|\b(?:pw|pwd|pat|auth|jwt)\b|(?<!per )\bpass\b"
    r"|^key$|(?:api|access|private|ssh|auth|account|encryption|signing|deploy|license|hub|hf|wandb|openai|aws) ?keys?\b"
)


def is_secret_name(name: str) -> bool:
    """Whether an option or a variable of this name holds a secret: --hub-token, HFToken, PGPASSWORD, db_pw."""
    spaced = re.sub(r"([a-z0-9])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2 ", name.rpartition(".")[2])
    return _SECRET.search(" ".join(re.findall(r"[a-z0-9]+", spaced.lower()))) is not None


def masked(name: str, value: object) -> object:
    """The value of an option, or the mask where it is a text and the name speaks of a secret."""
    return MASK if isinstance(value, str) and value and is_secret_name(name) else value
