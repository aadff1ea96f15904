"""Models that several files of unit tests describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parent / "published_configs.json"


@pytest.fixture(scope="session")
def small_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of two layers with 16 experts. It has a config.json and no weights."""
    path = tmp_path_factory.mktemp("small_mixtral")
    config = json.loads(PUBLISHED.read_text())["Mixtral-8x7B"] | {"num_hidden_layers": 2, "num_local_experts": 16}
    (path / "config.json").write_text(json.dumps(config))
    return path
