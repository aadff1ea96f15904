"""Fixtures of tests with faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import Fault, Planted


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planted]:
    """Plant a fault in the ranks that this test starts."""

    def plant(**fault: Any) -> Planted:
        folder = tmp_path / "planted"
        folder.mkdir()
        planted = Planted(folder, Fault(**fault))
        for name, value in planted.environment.items():
            monkeypatch.setenv(name, value)
        return planted

    return plant
