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
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
Address = tuple[str, int]
_TIMEOUT_S = 2.0
_TCP_STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # the first bytes of a client of torch's TCPStore
_SET = b"\x01"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a hostile file or peer achieved: everything is False where stormo held."""

    name: str
    code_run: bool = False
    deleted: bool = False
    job_ended: bool = False
    traceback: bool = False
    hang: bool = False
    memory_exceeded: bool = False
    wrongly_accepted: bool = False
    detail: str = ""


def become() -> None:
    """Become the user nobody, if this is root."""
    for encoding in ("idna", "latin-1"):  # which nobody may be unable to load
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


def send(address: Address, data: bytes, *, reads_reply: bool = True) -> str:
    """Connect, send data, and return the reply."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
        connection.sendall(data)
        deadline = time.monotonic() + _TIMEOUT_S
        while reads_reply and time.monotonic() < deadline and len(received) < 1 << 20:
            if not (piece := connection.recv(65536)):
                break
            received += piece
    return received.decode("latin-1")


def send_to_all(addresses: Sequence[Address], data: bytes) -> None:
    """Send the same to several ports."""
    for address in addresses:
        send(address, data, reads_reply=False)


def converse(address: Address, replies: Sequence[str]) -> str:
    """Answer every line of a server with the next of some lines; `NONCE` stands for the nonce it has sent."""
    received: list[str] = []
    with contextlib.suppress(OSError, ValueError), socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
        lines = connection.makefile("r", encoding="latin-1")
        for reply in replies:
            received.append(lines.readline(1 << 16))
            nonce = json.loads(received[-1]).get("nonce", "")
            connection.sendall(reply.replace("NONCE", str(nonce)).encode() + b"\n")
        received.append(lines.read(1 << 16))
    return "".join(received)


def hold(addresses: Sequence[Address], count: int, seconds: float, data: bytes = b"") -> int:
    """Open many connections to each port, keep them open, and send a byte now and then."""
    held: list[socket.socket] = []
    for address in addresses:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, timeout=0.5))
    for byte in data or b" ":
        for each in held if data else ():
            with contextlib.suppress(OSError):
                each.sendall(bytes([byte]))
        time.sleep(seconds / max(1, len(data)))
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
    data = _TCP_STORE + b"".join(_SET + _sized(b"/" + key.encode()) + _sized(value) for key, value in values.items())
    for _ in range(times):
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                done += 1
        time.sleep(every_s)
    return done


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


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
    data = b"".join(_SET + _sized(b"/" + key.encode()) + _sized(value) for key, value in values.items())
    while time.monotonic() < deadline and not Path(until).exists():
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as connection:
            connection.sendall(_TCP_STORE)
            while time.monotonic() < deadline and not Path(until).exists():
                connection.sendall(data)
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
    received: list[str] = []
    with socket.create_server(address) as listener:
        listener.settimeout(0.2)
        deadline = time.monotonic() + seconds
        threads: list[threading.Thread] = []
        while time.monotonic() < deadline and not Path(until).exists():
            with contextlib.suppress(TimeoutError):
                arguments = (listener.accept()[0], lines, received)
                threads.append(threading.Thread(target=_serve, args=arguments, daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
    return "".join(received)


def _serve(connected: socket.socket, lines: Sequence[str], received: list[str]) -> None:
    code = ""
    with contextlib.suppress(OSError), connected:
        connected.settimeout(_TIMEOUT_S)
        for line in lines:
            connected.sendall(line.replace("CODE", code).encode("latin-1"))
            received.append(connected.recv(65536).decode("latin-1"))
            with contextlib.suppress(ValueError, AttributeError):
                code = str(json.loads(received[-1]).get("code", ""))
        received.append(connected.recv(65536).decode("latin-1"))
