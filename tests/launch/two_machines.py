"""Two machines on one: network and host-name namespaces joined by a virtual switch. To be run inside `unshare -rnu`.

Starts one agent on each (hosts n1 and n2), lets one leave the network if asked to, and prints how both ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Machine:
    """One namespace pair, held open by a sleeping process."""

    def __init__(self, number: int) -> None:
        self.name = f"n{number}"
        self._number = number
        self._holder = subprocess.Popen(["unshare", "-nu", "sleep", "600"])
        self._enter = ["nsenter", "-t", str(self._holder.pid), "-n", "-u"]
        deadline = time.monotonic() + 10
        own_namespace = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._holder.pid}/ns/net").readlink() == own_namespace:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run("ip", "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        run("ip", "link", "set", self.port, "master", "switch", "up")
        run(*self._enter, "hostname", self.name)
        run(*self._enter, "ip", "link", "set", "lo", "up")
        run(*self._enter, "ip", "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
        run(*self._enter, "ip", "link", "set", "eth0", "up")

    @property
    def port(self) -> str:
        return f"port{self._number}"

    def start(self, arguments: dict[str, Any]) -> subprocess.Popen[str]:
        command = [*self._enter, sys.executable, str(HERE / "agent_program.py"), json.dumps(arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def leave_network(self) -> None:
        """The cable still looks plugged in, but no packet passes: nobody is told."""
        run("ip", "link", "set", self.port, "nomaster")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


def main() -> None:
    request = json.loads(sys.argv[1])
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
    machines = [Machine(1), Machine(2)]
    try:
        node = {"num_workers": 1, "num_nodes": 2, "master_addr": "10.99.0.1", "master_port": 29600}
        agents = [
            machine.start({**request["agent"], "node": {**node, "node_id": node_id}})
            for node_id, machine in enumerate(machines)
        ]
        if request["cut"]:
            for agent in agents:
                assert agent.stdout is not None
                assert "ready" in agent.stdout.readline()
            machines[1].leave_network()
        endings = []
        for machine, agent in zip(machines, agents, strict=True):
            _, err = agent.communicate(timeout=60)
            endings.append({"host": machine.name, "code": agent.returncode, "err": err})
        print(json.dumps(endings))
    finally:
        for machine in machines:
            machine.close()


if __name__ == "__main__":
    main()
