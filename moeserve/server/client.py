"""`Client`: the sender of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """Who sent a request, and how."""

    name: str  # of its key
    request_id: str
    path: str
    headers: Mapping[str, str]
