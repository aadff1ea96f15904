"""`Client`: the sender of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """The sender of a request, and the request's metadata."""

    name: str  # derived from the API key
    request_id: str
    path: str
    headers: Mapping[str, str]
