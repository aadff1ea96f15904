"""Addresses of this machine, by interface, subnet and destination."""

from __future__ import annotations

import socket

import pytest

from moeserve import addresses
from moeserve.addresses import address_on, address_towards, is_loopback, own_addresses
from moeserve.errors import SettingsError


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"lo": "127.0.0.1", "eth1": "10.1.2.3"})


def test_own_addresses_are_those_that_this_machine_can_listen_on() -> None:
    found = own_addresses()
    assert found["lo"] == "127.0.0.1"
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    for address in found.values():
        socket.create_server((address, 0)).close()


def test_an_address_is_found_by_the_name_of_its_interface() -> None:
    for name, address in own_addresses().items():
        assert address_on(name) == address


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize("subnet", ["10.1.0.0/16", "10.1.2.3/32", "10.1.99.99/16", "0.0.0.0/1"])
def test_an_address_is_found_by_its_subnet(subnet: str) -> None:
    assert address_on(subnet) == ("127.0.0.1" if subnet == "0.0.0.0/1" else "10.1.2.3")


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize("interface", ["eth0", "10.2.0.0/16", "fd00::/8", ""])
def test_an_unknown_interface_is_refused_with_the_existing_ones(interface: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        address_on(interface)
    for text in (f"network_interface={interface!r}", socket.gethostname(), "lo (127.0.0.1)", "eth1 (10.1.2.3)"):
        assert text in str(refusal.value)


@pytest.mark.parametrize("subnet", ["10.1.0.0/33", "10.1/16", "eth0/24", "/"])
def test_an_invalid_subnet_is_refused(subnet: str) -> None:
    with pytest.raises(SettingsError, match=rf"network_interface='{subnet}'"):
        address_on(subnet)


def test_the_address_towards_this_machine_is_where_it_is_reached() -> None:
    assert address_towards("127.0.0.1") == address_towards("localhost") == address_towards("127.0.1.1") == "127.0.0.1"
    for address in own_addresses().values():
        assert address_towards(address) == address


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", True), ("127.0.1.1", True), ("10.1.2.3", False), ("0.0.0.0", False)]
)
def test_a_loopback_address_is_recognised(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected
