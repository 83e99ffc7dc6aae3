"""What another account of the same machine sends to the ports of a job. Every loop ends, and all stays on loopback."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NOBODY = 65534
Address = tuple[str, int]
_PATIENCE_S = 2.0
_TCP_STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # the first words of a client of torch's TCPStore
_SET = b"\x01"


def become() -> None:
    """Be nobody, where this is root."""
    for encoding in ("idna", "latin-1"):  # which nobody may not be able to load
        codecs.lookup(encoding)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


class Plant:
    """Touches a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mknod, (self._marker, 0o100644)


def planted(marker: str) -> bytes:
    """A pickle that shows where it was run."""
    return pickle.dumps(Plant(marker))


def say(address: Address, words: bytes, *, is_heard: bool = True) -> str:
    """Connect, say something, and hear what comes back."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_PATIENCE_S) as stranger:
        stranger.sendall(words)
        deadline = time.monotonic() + _PATIENCE_S
        while is_heard and time.monotonic() < deadline and len(heard) < 1 << 20:
            if not (piece := stranger.recv(65536)):
                break
            heard += piece
    return heard.decode("latin-1")


def say_everywhere(addresses: Sequence[Address], words: bytes) -> None:
    """Say the same at several ports."""
    for address in addresses:
        say(address, words, is_heard=False)


def converse(address: Address, replies: Sequence[str]) -> str:
    """Answer every line of a server with the next of some lines; `NONCE` stands for the nonce it has sent."""
    heard: list[str] = []
    with contextlib.suppress(OSError, ValueError), socket.create_connection(address, timeout=_PATIENCE_S) as stranger:
        lines = stranger.makefile("r", encoding="latin-1")
        for reply in replies:
            heard.append(lines.readline(1 << 16))
            nonce = json.loads(heard[-1]).get("nonce", "")
            stranger.sendall(reply.replace("NONCE", str(nonce)).encode() + b"\n")
        heard.append(lines.read(1 << 16))
    return "".join(heard)


def hold(addresses: Sequence[Address], count: int, seconds: float, words: bytes = b"") -> int:
    """Open many connections to each port, keep them open, and say a byte of something now and then."""
    held: list[socket.socket] = []
    for address in addresses:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, timeout=0.5))
    for byte in words or b" ":
        for each in held if words else ():
            with contextlib.suppress(OSError):
                each.sendall(bytes([byte]))
        time.sleep(seconds / max(1, len(words)))
    for each in held:
        each.close()
    return len(held)


def storm(address: Address, count: int) -> None:
    """Open and close connections as fast as it goes."""
    for _ in range(count):
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=0.5).close()


def write_to_store(addresses: Sequence[Address], values: dict[str, bytes], times: int = 1, every_s: float = 0.0) -> int:
    """Write keys into a TCPStore, if there is one at a port; how often it seemed to go well."""
    done = 0
    words = _TCP_STORE + b"".join(_SET + _sized(b"/" + key.encode()) + _sized(value) for key, value in values.items())
    for _ in range(times):
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                done += 1
        time.sleep(every_s)
    return done


def _sized(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def write_once(address: Address, values: dict[str, bytes], within_s: float) -> int:
    """Write keys into a TCPStore as soon as it is there."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if done := write_to_store([address], values):
            return done
        time.sleep(0.02)
    return 0


def write_often(address: Address, values: dict[str, bytes], seconds: float, until: str) -> int:
    """Write keys into a TCPStore as soon as it is there, again and again until a file is."""
    deadline, done = time.monotonic() + seconds, 0
    words = b"".join(_SET + _sized(b"/" + key.encode()) + _sized(value) for key, value in values.items())
    while time.monotonic() < deadline and not Path(until).exists():
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as stranger:
            stranger.sendall(_TCP_STORE)
            while time.monotonic() < deadline and not Path(until).exists():
                stranger.sendall(words)
                done += 1
                time.sleep(0.002)
        time.sleep(0.02)
    return done


def open_private(pids: Sequence[int], names: Sequence[str]) -> list[str]:
    """Which private files of these processes can be opened."""
    found: list[str] = []
    for pid in pids:
        for path in (
            *(Path(f"/proc/{pid}/{name}") for name in names),
            *(Path(f"/proc/{pid}/fd/{n}") for n in range(64)),
        ):
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                found.append(str(path))
    return found


def listen(address: Address, lines: Sequence[str], seconds: float, until: str) -> str:
    """Sit on a port until a file is there: say the next line after whatever comes; `CODE` is the code that has come."""
    heard: list[str] = []
    with socket.create_server(address) as listener:
        listener.settimeout(0.2)
        deadline = time.monotonic() + seconds
        threads: list[threading.Thread] = []
        while time.monotonic() < deadline and not Path(until).exists():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=_serve, args=(listener.accept()[0], lines, heard), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(_PATIENCE_S)
    return "".join(heard)


def _serve(connected: socket.socket, lines: Sequence[str], heard: list[str]) -> None:
    code = ""
    with contextlib.suppress(OSError), connected:
        connected.settimeout(_PATIENCE_S)
        for line in lines:
            connected.sendall(line.replace("CODE", code).encode("latin-1"))
            heard.append(connected.recv(65536).decode("latin-1"))
            with contextlib.suppress(ValueError, AttributeError):
                code = str(json.loads(heard[-1]).get("code", ""))
        heard.append(connected.recv(65536).decode("latin-1"))
