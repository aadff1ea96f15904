"""`Hosts`: the host names that requests may address.

A web page can let its own name resolve to 127.0.0.1 (DNS rebinding), and then read responses of a server on the machine
of its visitor. Such requests have the page's name in their Host header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from moeserve.server.errors import ApiError

LOCAL_NAMES = frozenset(["host.docker.internal"])  # names of this machine that no public name server resolves


class Hosts:
    """Accepts IP addresses, allowed names, and names that no one can register: without a dot, or of this machine."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """
        Args:
            allowed: additional host names.
        """
        self._allowed = frozenset(name.lower().rstrip(".") for name in allowed)

    def require(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError if the Host header names a host that is not accepted."""
        name = host_name(headers.get("host", ""))
        if "." not in name or name.endswith(".localhost") or name in LOCAL_NAMES | self._allowed or _is_address(name):
            return
        raise ApiError(
            403, f"the host {name[:100]!r} is not served here; start the server with --allowed-host {name[:100]}"
        )


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def hosts_for(address: str, allowed: Iterable[str] | None, *, has_keys: bool) -> Hosts | None:
    """Return the hosts that a server accepts; None: all, because API keys are needed, or other machines have access.

    Args:
        address: the address on which the server listens.
        allowed: host names from the settings.
    """
    is_local = address == "localhost" or (_is_address(address) and ipaddress.ip_address(address).is_loopback)
    if has_keys or not is_local:
        return None
    return Hosts(allowed or ())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
