"""Checkpoints and processes that tests share. Random numbers are seeded before each test."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from ranks import Ranks
from reference_models import DIVISIBLE, EVERY_SHAPE, SHAPES, Reference, make_reference

# The same examples in every run, on machines of any speed.
settings.register_profile(
    "seeded", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")


def pytest_configure() -> None:
    """Let SIGINT raise KeyboardInterrupt here and in child processes. A shell lets background jobs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the parametrisations of a test that are slow, before pytest chooses by marks."""
    for item in items:
        mark = item.get_closest_marker("slow_but")
        if mark is not None and not any(part in item.name for part in mark.args):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers, whichever tests run before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def log_is_restored() -> Iterator[None]:
    """Remove the log that a test has started: its handler has the stream that pytest closes after this test."""
    loggers = [logging.getLogger(name) for name in ("", "moeserve.access")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:  # pytest's own handlers are of derived classes
                logger.removeHandler(handler)


@pytest.fixture(scope="session")
def default_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of all processes of a test session, in which the default model is built once."""
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESERVE_CACHE", str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"))
        yield Path(os.environ["MOESERVE_CACHE"])


@pytest.fixture(scope="session")
def reference_named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reference]]:
    """Return a reference by name. Each is made once."""
    made: dict[str, Reference] = {}

    def named(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(tmp_path_factory.mktemp(name), (SHAPES | DIVISIBLE)[name])
        return made[name]

    yield named
    for reference in made.values():
        reference.close()


@pytest.fixture(scope="session", params=EVERY_SHAPE)
def reference(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> Reference:
    """Every reference in turn."""
    return reference_named(request.param)


@pytest.fixture(scope="session")
def plain(reference_named: Callable[[str], Reference]) -> Reference:
    """One ordinary shape, for tests that do not depend on shapes."""
    return reference_named("mixtral")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Rank processes that wait for functions to run."""
    shared = Ranks()
    yield shared
    shared.close()


@pytest.fixture
def num_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often this process reads a checkpoint's weights."""
    from moeserve.worker.weight_sources import checkpoint_tensors

    count = [0]
    load_weights = checkpoint_tensors.load_weights

    def counted(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        load_weights(*arguments, **options)

    monkeypatch.setattr(checkpoint_tensors, "load_weights", counted)
    return count
