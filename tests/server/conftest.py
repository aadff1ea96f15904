"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM


@pytest.fixture(scope="session")
def llm(default_cache: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_model_len=1024, kv_cache_memory="64MiB", max_num_seqs=8, show_progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def server(llm: AsyncLLM) -> Iterator[RunningServer]:
    with running(llm) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for many requests."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, max_num_seqs=128, show_progress=False)
    with running(llm) as server:
        yield server
    llm.shutdown()
