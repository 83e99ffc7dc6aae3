"""Listening happens on one address, and what cannot be is one sentence."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from stormo.errors import SettingError
from stormo.launch import address
from stormo.launch.address import interface_towards, listen, listening_address


def test_without_other_machines_it_is_loopback() -> None:
    assert listening_address("any.name.invalid", all_on_this_host=True) == "127.0.0.1"


def test_an_address_given_by_its_number_is_taken_as_it_is() -> None:
    assert listening_address("127.0.0.2", all_on_this_host=False) == "127.0.0.2"
    assert listening_address("localhost", all_on_this_host=False) in ("127.0.0.1", "::1")


def test_a_host_name_that_leads_to_loopback_gives_the_address_others_can_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian maps a machine's own name to 127.0.1.1, where no other machine could come in."""
    routes: dict[str, str | None] = {"10.0.0.9": "10.0.0.5", "192.0.2.1": "192.168.1.5"}
    own = {"lo": ["127.0.0.1"], "eth0": ["192.168.1.5"], "ib0": ["10.0.0.5"]}
    names = {"n1": ["127.0.1.1", "::ffff:127.0.1.1"], "n2": ["10.0.0.9"]}
    monkeypatch.setattr(address, "resolve", lambda name: names[name])
    monkeypatch.setattr(address, "address_towards", routes.get)
    monkeypatch.setattr(address, "_own_addresses", lambda: own)
    assert listening_address("n1", all_on_this_host=False, peer="n2") == "10.0.0.5"  # by the route to a peer
    assert listening_address("n1", all_on_this_host=False) == "192.168.1.5"  # by the default route
    routes["192.0.2.1"] = None
    with pytest.raises(SettingError, match=r"the others may come to any of 192\.168\.1\.5, 10\.0\.0\.5; set it"):
        listening_address("n1", all_on_this_host=False)
    del own["eth0"]
    assert listening_address("n1", all_on_this_host=False) == "10.0.0.5"  # the only network
    del own["ib0"]
    assert listening_address("n1", all_on_this_host=False) == "127.0.1.1"


def test_the_interface_of_a_secondary_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(*entries: tuple[socket.AddressFamily, str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(family=family, address=number) for family, number in entries]

    cards = {
        "lo": card((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_PACKET, "00:00:00:00:00:00")),
        "eth0": card((socket.AF_INET, "10.0.0.5"), (socket.AF_INET, "10.0.1.5"), (socket.AF_INET6, "fe80::5%eth0")),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(address, "address_towards", lambda number: number)
    for number, interface in (
        ("10.0.0.5", "eth0"),
        ("10.0.1.5", "eth0"),
        ("fe80::5", "eth0"),
        ("::1", "lo"),
        ("10.0.2.5", None),
    ):
        assert interface_towards(number) == interface


def test_a_reachable_address_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: ["127.0.1.1", "10.0.0.7"])
    assert listening_address("n1", all_on_this_host=False) == "10.0.0.7"


@pytest.mark.parametrize("name", ["0.0.0.0", "::"])
def test_a_wildcard_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="stands for all addresses"):
        listening_address(name, all_on_this_host=False)


def test_a_listener_is_bound_to_exactly_its_address() -> None:
    with listen("127.0.0.3", 0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_port_just_used_can_be_used_again(free_port: int) -> None:
    for _ in range(2):
        with listen("127.0.0.1", free_port) as listener, socket.create_connection(("127.0.0.1", free_port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # this side closes first and lingers
            assert client.recv(1) == b""


def test_a_busy_port_and_a_foreign_address_are_one_sentence_each() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SettingError, match=f"--master-port {port} was set, but another process"):
            listen("127.0.0.1", port)
    with pytest.raises(SettingError, match="not an address of host"):
        listen("192.0.2.1", 0)
