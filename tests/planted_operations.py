"""Changes of operations, with which tests replace those of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moeserve.ops.backend import Implementation


def plant(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Implementation[Any, Any]], name: str, change: Callable[[Any], Any]
) -> None:
    """Replace what an implementation of a table makes by `change` of it."""
    right = table[name].make
    monkeypatch.setitem(table, name, Implementation(lambda backend, shape: change(right(backend, shape))))
