"""An ssh server on every host, to which root comes with a key that lives as long as the tests."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.system.hosts import Host, run, wait_until

_PORT = 2222
_SERVER = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
"""
_CLIENT = """\
Host *
  Port {port}
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


class Ssh:
    """Servers, and the words of a client that they let in."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        for name in ("key", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        public = (folder / "host_key.pub").read_text()
        names = [name for host in hosts for name in (host.name, host.address)]
        (folder / "known_hosts").write_text("".join(f"[{name}]:{_PORT} {public}" for name in names))
        for file, text in (("sshd_config", _SERVER), ("ssh_config", _CLIENT)):
            (folder / file).write_text(text.format(port=_PORT, folder=folder))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # into which the server locks what is not yet let in
        server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
        assert server is not None
        self.client = shlex.join(["ssh", "-F", str(folder / "ssh_config")])
        for host in hosts:
            host.start_daemon(server, "-D", "-e", "-f", str(folder / "sshd_config"))
        wait_until(lambda: all(self._listens(host) for host in hosts), 20.0, "no ssh server came up")
        for host in hosts:
            host.keep_daemons()

    def _listens(self, host: Host) -> bool:
        return any(listener.port == _PORT for listener in host.listeners())
