"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Ranks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what starts processes, before tests are chosen by mark."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name != "test_dispatch.py":
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    shared = Ranks()
    yield shared
    shared.close()
