"""IPv4 addresses of this machine: by interface, by subnet, and towards another machine. Opens no connection."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys

import msgspec

from moeserve.errors import SettingsError

SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921  # request for an interface's address; else: macOS
_ANY_PORT = 9  # "connecting" a datagram socket only looks up the route


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address and secret of the store where the ranks of one launch meet. See `distributed/store_server.py`."""

    name: str = ""  # name of a socket on this host, see `processes/local_sockets.py`; empty: use host and port
    host: str = ""
    port: int = 0
    key: str  # secret, hexadecimal

    def __str__(self) -> str:
        return self.name or f"{self.host}:{self.port}"


class AgentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the agent on another host, which starts ranks there. See `executor/hosts/agent.py`."""

    number: int  # number of the host, from 1
    host: str
    port: int
    key: str  # secret, hexadecimal


def own_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one, keyed by the interface's name."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def address_on(interface: str, setting: str = "network_interface") -> str:
    """Return this machine's address on an interface, given by its name ("eth1") or a subnet ("10.1.0.0/16").

    Args:
        setting: name of the setting that names the interface, for error messages.

    Raises:
        SettingsError: there is no such interface.
    """
    addresses = own_addresses()
    if "/" in interface:
        try:
            subnet = ipaddress.ip_network(interface, strict=False)
        except ValueError as error:
            raise SettingsError(
                f"{setting}={interface!r} is not a subnet ({error}); an example is 10.1.0.0/16"
            ) from None
        found = [address for address in addresses.values() if ipaddress.ip_address(address) in subnet]
    else:
        found = [addresses[interface]] if interface in addresses else []
    if not found:
        existing = ", ".join(f"{name} ({address})" for name, address in addresses.items()) or "none with IPv4"
        raise SettingsError(f"{setting}={interface!r}: {socket.gethostname()} has no such interface; it has {existing}")
    return found[0]


def address_towards(host: str) -> str:
    """Return the address from which this machine would connect to a host.

    Raises:
        OSError: the host's name is not known, or there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Return True for an address of this machine. An interface may have several addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    """Return True for an address that only this machine itself can reach."""
    return ipaddress.ip_address(address).is_loopback
