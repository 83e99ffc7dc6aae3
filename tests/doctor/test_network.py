"""What the doctor says of the network, from machines that a test describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.doctor import network
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.errors import SettingError
from tests.doctor.machines import bad, write


def card(
    name: str, speed: int = 100_000, mtu: int = 9000, flags: str = "0x1003", state: str = "up"
) -> dict[str, object]:
    at = f"sys/class/net/{name}"
    return {f"{at}/speed": speed, f"{at}/mtu": mtu, f"{at}/flags": flags, f"{at}/operstate": state}


def port(name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, object]:
    at = f"sys/class/infiniband/{name}/ports/1"
    return {f"{at}/state": state, f"{at}/phys_state": "5: LinkUp", f"{at}/rate": rate}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A healthy machine with one card and the loopback interface."""
    write(tmp_path, card("lo", -1, 65536, "0x9", "unknown") | card("eth0"))
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    write(tmp_path, {"proc/net/route": f"{header}\neth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0"})
    return tmp_path


def look(root: Path, number: str = "10.0.0.7", **environ: str) -> list[Finding]:
    machine = Machine(root=root, environ=environ)
    return list(network.check(machine, lambda _: [number], lambda: "node7"))


def test_a_healthy_machine(root: Path) -> None:
    found = look(root)
    assert not bad(found)
    assert [one.text for one in found] == ["eth0: 100 Gbit/s, MTU 9000, default route", "node7 is 10.0.0.7"]


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        (card("eth0", 1000, 1500), ("network-card", "note"), "at most 125 MB/s of gradients"),
        (card("eth0", 100_000, 1500), ("network-card", "note"), "MTU 1500"),
        (card("eth0", 100_000, 576), ("network-card", "warning"), "too small"),
        (card("eth0", -1, 1500, "0x1002", "down"), ("network-card", "note"), "no network card is up"),
        (card("lo", -1, 65536, "0x8", "down"), ("loopback", "error"), "lo is not up"),
        ({"etc/ufw/ufw.conf": "LOGLEVEL=low\nENABLED=yes"}, ("firewall", "note"), "ufw"),
        ({"proc/812/comm": "firewalld"}, ("firewall", "note"), "firewalld"),
        ({"etc/nccl.conf": "NCCL_DEBUG=INFO"}, ("variables", "note"), "/etc/nccl.conf"),
    ],
)
def test_a_bad_machine(root: Path, files: dict[str, object], expected: tuple[str, str], words: str) -> None:
    write(root, files)
    found = look(root)
    assert bad(found) == [expected]
    assert any(words in one.text for one in found if one.level != "ok")


def test_virtual_cards_are_left_out_unless_there_is_nothing_else(root: Path) -> None:
    write(root, card("docker0", 10_000, 1500))
    (root / "sys/devices/virtual/net/docker0").mkdir(parents=True)
    assert [one.text for one in look(root) if one.check == "network-card"] == [
        "eth0: 100 Gbit/s, MTU 9000, default route"
    ]
    write(root, card("eth0", flags="0x1002"))
    assert [one.facts["card"] for one in look(root) if one.check == "network-card"] == ["docker0"]


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([port("mlx5_0"), port("mlx5_1")], []),
        ([port("mlx5_0"), port("mlx5_1", "1: DOWN")], [("infiniband", "note")]),
        ([port("mlx5_0", "2: INIT")], [("infiniband", "warning")]),
        ([port("mlx5_0"), port("mlx5_1", rate="100 Gb/sec (1X NDR)")], [("infiniband", "warning")]),
    ],
)
def test_infiniband(root: Path, ports: list[dict[str, object]], expected: list[tuple[str, str]]) -> None:
    for files in ports:
        write(root, files)
    write(root, {"dev/infiniband/uverbs0": ""})
    assert bad(look(root)) == expected


def test_infiniband_that_a_container_does_not_get(root: Path) -> None:
    write(root, port("mlx5_0"))
    found = look(root)
    assert bad(found) == [("infiniband", "warning")]
    assert any("/dev/infiniband" in one.fix for one in found)


def test_the_hosts_own_name(root: Path) -> None:
    found = look(root, "127.0.1.1")
    assert bad(found) == [("host-name", "warning")]
    assert "leads to 127.0.1.1, where no other machine can come in" in found[-1].text

    def unknown(name: str) -> list[str]:
        raise SettingError(name, "there is none", "x")

    found = list(network.check(Machine(root=root, environ={}), unknown, lambda: "node7"))
    assert "node7, leads to no address" in found[-1].text
    assert bad(found) == [("host-name", "warning")]


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "error"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "error"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "error"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "error"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "error"),
    ],
)
def test_cards_that_a_variable_names(root: Path, variable: str, value: str, level: str) -> None:
    (found,) = [one for one in look(root, **{variable: value}) if one.check == "socket-card"]
    assert found.level == level


def test_variables_that_slow(root: Path) -> None:
    assert bad(look(root, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="0")) == [("variables", "warning")]
    assert bad(look(root, NCCL_IB_DISABLE="1")) == [("variables", "note")]
    write(root, port("mlx5_0") | {"dev/infiniband/uverbs0": ""})
    assert bad(look(root, NCCL_IB_DISABLE="1")) == [("variables", "warning")]
    assert bad(look(root, NCCL_ALGO="Ring", NCCL_PROTO="LL")) == [("variables", "note")]
    assert bad(look(root, TORCH_DISTRIBUTED_DEBUG="DETAIL")) == [("variables", "warning")]
