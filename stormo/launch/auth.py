"""The secret of a job, and how two of its members show each other that they know it.

The secret is STORMO_SECRET, or else a key that this user's first job leaves in the home folder, which the hosts of a
cluster share. The environment of a process is private to its user; its command line is not.

The server sends a nonce; the client answers with its own nonce and a code over both; the server answers with its code.
Roles are part of the codes, so that none can be reflected. From then on every line is signed (`Seal`): a relay of the
handshake between two honest members could otherwise send lines in their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.errors import SettingError
from stormo.system.files import BadFileError, open_to_read, temporary_name

VARIABLE = "STORMO_SECRET"
_NUM_BYTES = 32
_FEWEST_CHARACTERS = 16
_OTHERS_BITS = 0o077  # rights of other users on the key
MAX_HANDSHAKE_BYTES = 1024  # of one line, before the other side is known
_NONCE_BYTES = 32
_CODE_BYTES = 32
_CLIENT, _SERVER, _TO_SERVER, _TO_CLIENT = b"client knows", b"server knows", b"to server", b"to client"


def new_secret() -> str:
    """A secret for one job, for `STORMO_SECRET` of all its processes."""
    return secrets.token_hex(_NUM_BYTES)


def job_secret(environ: Mapping[str, str], port: int) -> bytes:
    """The secret of the job at this port; another job of the same user has another one."""
    given = environ.get(VARIABLE)
    if given is not None and len(given) < _FEWEST_CHARACTERS:
        raise SettingError(
            f"{VARIABLE} was set to a text of {len(given)} characters",
            f"it could be guessed with fewer than {_FEWEST_CHARACTERS}",
            f"set it to the output of `openssl rand -hex {_NUM_BYTES}` on every host, or unset it",
        )
    key = _user_key(environ) if given is None else os.fsencode(given)
    return hmac.digest(key, f"stormo control channel at port {port}".encode(), hashlib.sha256)


def remedy(environ: Mapping[str, str]) -> str:
    """What to do where two hosts of one job do not have the same secret."""
    if VARIABLE in environ:
        return f"set {VARIABLE} to the same text on every host"
    return (
        f"where the hosts share no home folder, set {VARIABLE} to the same text of {_FEWEST_CHARACTERS} or more "
        f"characters on every host"
    )


def _user_key(environ: Mapping[str, str]) -> bytes:
    """The key of this user, created if there is none."""
    folder = _home_folder(environ)
    if folder is None:  # as in a container: then it serves one host
        folder = Path(tempfile.gettempdir()) / f"stormo-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _require_own(folder, folder.lstat(), is_folder=True)
    path = folder / "secret"
    for _ in range(2):
        try:
            with open_to_read(path, _NUM_BYTES) as file:
                _require_own(path, os.fstat(file.fileno()), is_folder=False)
                key = file.read(_NUM_BYTES + 1)
        except FileNotFoundError:
            _make(path)
            continue
        except BadFileError as error:
            raise _unusable(path, error.problem) from None
        if len(key) != _NUM_BYTES:
            raise _unusable(path, f"it does not hold {_NUM_BYTES} bytes")
        return key
    raise _unusable(path, "it vanishes as soon as it is made")


def _home_folder(environ: Mapping[str, str]) -> Path | None:
    """stormo's folder in the user's home; None where it cannot be written to.

    XDG_CONFIG_HOME does not count: it may be set in a shell and not in what ssh or mpirun starts.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no such home
        folder = Path(environ.get("HOME") or Path.home()) / ".config" / "stormo"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / "secret").exists() or os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def _make(path: Path) -> None:
    """Write a key under a temporary name and link it, unless another process was first."""
    new = temporary_name(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    except OSError as error:
        raise _unusable(path, f"it cannot be made ({error.strerror})") from None
    finally:
        new.unlink(missing_ok=True)


def _require_own(path: Path, status: os.stat_result, *, is_folder: bool) -> None:
    is_right_kind = stat.S_ISDIR(status.st_mode) if is_folder else stat.S_ISREG(status.st_mode)
    if not is_right_kind or status.st_uid != os.geteuid():
        raise _unusable(path, f"it is no {'folder' if is_folder else 'file'} of this user")
    if status.st_mode & _OTHERS_BITS:
        raise _unusable(path, f"other users have rights on it (mode {stat.S_IMODE(status.st_mode):04o})")


def _unusable(path: Path, why: str) -> SettingError:
    return SettingError(f"the key of this user's jobs is {path}", why, f"remove it, or set {VARIABLE}")


class Seal:
    """Signs the lines of one direction with their numbers: none can be changed, left out or repeated."""

    SIZE = 32  # characters in front of a line

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def code(self, line: bytes | bytearray) -> bytes:
        """The signature of the next line."""
        self._number += 1
        code = hmac.digest(self._key, b"%d " % self._number + line, hashlib.sha256)
        return code.hex()[: self.SIZE].encode()


@dataclass(frozen=True, slots=True)
class Handshake:
    """One handshake: the nonces of both sides, and the secret."""

    secret: bytes
    server_nonce: str
    client_nonce: str

    def client_code(self) -> str:
        """Proves that the client knows the secret."""
        return self._mac(_CLIENT).hex()

    def server_code(self) -> str:
        """Proves that the server knows the secret."""
        return self._mac(_SERVER).hex()

    def seals(self) -> tuple[Seal, Seal]:
        """The seals of what goes to the server, and of what goes to the client."""
        return Seal(self._mac(_TO_SERVER)), Seal(self._mac(_TO_CLIENT))

    def _mac(self, role: bytes) -> bytes:
        message = b"|".join((role, self.server_nonce.encode(), self.client_nonce.encode()))
        return hmac.digest(self.secret, message, hashlib.sha256)


def new_nonce() -> str:
    """A new random number."""
    return secrets.token_hex(_NONCE_BYTES)


def nonce_in(message: Mapping[str, Any]) -> str | None:
    """The nonce of an untrusted message; None where it has none."""
    return _hex(message.get("nonce"), _NONCE_BYTES)


def has_code(message: Mapping[str, Any], expected: str) -> bool:
    """Whether an untrusted message carries this code."""
    code = _hex(message.get("code"), _CODE_BYTES)
    return code is not None and hmac.compare_digest(code, expected)


def _hex(value: object, num_bytes: int) -> str | None:
    is_hex = isinstance(value, str) and len(value) == 2 * num_bytes and set(value) <= set("0123456789abcdef")
    return str(value) if is_hex else None
