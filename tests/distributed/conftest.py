"""Which tests of this folder start processes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what starts processes, before tests are chosen by mark."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name != "test_dispatch.py":
            item.add_marker(pytest.mark.ranks)
