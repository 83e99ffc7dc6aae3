"""`stormo watch [RUN]`: serves the page of a running training to whoever has the token in its address.

On loopback unless `--host` is set; plain HTTP, so use an SSH tunnel across a network.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stormo.config.options import Parser
from stormo.errors import SettingError
from stormo.report.history import files_version, read_history
from stormo.report.page import check_plotly, make_document, make_page
from stormo.telemetry.folder import RunFolder, to_json
from stormo.telemetry.runs_folder import find_run
from stormo.telemetry.text import write_text

_POLL_S = 2.0
_BUILDS_SHARE = 0.25  # of the time at most goes to building pages
_TOKEN_BYTES = 24


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    parser = Parser(
        prog="stormo watch",
        description="Serve the page of a run while it is running; Ctrl-C ends it.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of the run, or its folder (default: the newest)")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument("--port", default="0", metavar="N", help="port to listen on (default: 0, any free one)")
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--wait", action="store_true", help="wait for a run whose folder does not exist yet")
    options = parser.parse_args(list(arguments))
    check_plotly()
    folder = _find(Path(options.runs_folder), options.run, wait=options.wait)
    server = Server(folder, options.host, _port(options.port))
    with server:
        if not folder.is_run:
            _print(f"{folder.path} holds no run yet: the page waits for it")
        if not server.is_loopback:
            _print(f"Warning: --host {options.host} is open to the network and not encrypted; an SSH tunnel is safer")
        _print(f"{folder.name} is shown at {server.address}  (Ctrl-C ends it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def _find(parent: Path, name: str | None, *, wait: bool) -> RunFolder:
    if name is None:
        return find_run(parent, None)
    if not name:
        raise SettingError("an empty name was given", "no run has that name", "name a run: stormo runs lists them")
    for candidate in (parent / name, Path(name)):
        if candidate.is_dir():
            return RunFolder(candidate)
    return RunFolder(parent / name) if wait else find_run(parent, name)


def _port(text: str) -> int:
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise SettingError(f"--port {text} was set", "a port is a number from 0 to 65535", "set one of them, or 0 for any")


def _print(text: str) -> None:
    write_text(f"{text}\n", sys.stdout)


class Server(ThreadingHTTPServer):
    """Serves the page of one run at `address`, which holds the token."""

    daemon_threads = True  # an open connection must not block Ctrl-C

    def __init__(self, folder: RunFolder, host: str, port: int) -> None:
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.live = Live(folder)
        self._host = host
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__((str(address[0]), port), Handler)
        except UnicodeError:
            raise SettingError(
                f"--host {host} was set", "that is not the name of a host", "set another address"
            ) from None
        except OSError as error:
            what = f"--port {port} was set" if error.errno == errno.EADDRINUSE else f"--host {host} was set"
            instead = (
                "set another one, or 0 for any free one" if error.errno == errno.EADDRINUSE else "set another address"
            )
            raise SettingError(what, f"nothing can listen there ({error.strerror})", instead) from None

    @property
    def is_loopback(self) -> bool:
        """True where only this machine can reach it."""
        return self._listens_at.is_loopback

    @property
    def _listens_at(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(str(self.server_address[0]).partition("%")[0])

    @property
    def address(self) -> str:
        """What to open in a browser."""
        # A browser cannot open 0.0.0.0, which means every address of this machine.
        host = socket.gethostname() if self._listens_at.is_unspecified else self._host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_address[1]}/?token={self.token}"

    def is_host_allowed(self, header: str | None) -> bool:
        """True where a Host header names this server: a foreign name is an attack on the browser (DNS rebinding)."""
        try:
            host = urlsplit(f"//{header or ''}").hostname or ""
        except ValueError:  # no name at all
            return False
        try:
            ipaddress.ip_address(host)  # an address cannot be made to lead elsewhere
        except ValueError:
            return host in self._names
        return True

    @cached_property
    def _names(self) -> frozenset[str]:
        """The names of this machine; getfqdn can take seconds."""
        names = ("localhost", self._host, socket.gethostname(), socket.getfqdn())
        return frozenset(name.lower() for name in names)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that left; show other errors without the address, which holds the token."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"stormo: a request could not be answered: {error!r}", file=sys.stderr)  # noqa: T201


class Live:
    """The newest document of a run, built once for all viewers."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._document: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """The document as of now."""
        with self._lock:
            version = files_version(self._folder)
            # A silent run changes its state although no file changes.
            version += f"-{int(time.time() // 60)}"
            if self._document is None or self._document["version"] != version:
                began = time.perf_counter()
                document = make_document([read_history(self._folder)])
                poll_s = max(_POLL_S, (time.perf_counter() - began) / _BUILDS_SHARE)
                self._document = {**document, "version": version, "poll_s": round(poll_s, 1)}
            return self._document


class Handler(BaseHTTPRequestHandler):
    """Answers `/` with the page and `/data` with its newest content, and nothing without the token."""

    server: Server
    server_version = "stormo"
    sys_version = ""
    timeout = 30  # an idle connection gives its thread back

    def do_GET(self) -> None:
        """Answer one request."""
        path, _, query_text = self.path.partition("?")
        query = parse_qs(query_text)
        token = query.get("token", [""])[0]
        if not self.server.is_host_allowed(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server has another name\n")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "the address lacks the token that stormo watch printed\n")
        elif path not in ("/", "/data"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only one page\n")
        else:
            self._show(path, query.get("version", [""])[0])

    def _show(self, path: str, version: str) -> None:
        try:
            document = self.server.live.document()
        except Exception as error:  # the viewer sees the error of a damaged file, and the server continues
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")
            return
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", make_page(document, is_live=True))
        elif document["version"] == version:
            self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
        else:
            self._answer(HTTPStatus.OK, "application/json", json.dumps(to_json(document), allow_nan=False))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: every line would hold the token."""
