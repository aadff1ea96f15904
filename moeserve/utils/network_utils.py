"""Names that vLLM has in `vllm.utils.network_utils`."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """Return a TCP port of the loopback interface that no process listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
