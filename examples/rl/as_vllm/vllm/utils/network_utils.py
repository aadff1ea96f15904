"""Names that TRL imports for its server mode."""

from moeserve.utils.network_utils import get_open_port

__all__ = ["get_ip", "get_open_port"]


def get_ip() -> str:
    """Return the address at which other processes of this host reach this one."""
    return "127.0.0.1"
