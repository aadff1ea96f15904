"""Checkpoints that several tests read, and the processes that they share."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from ranks import Ranks
from reference_models import DIVISIBLE, SHAPES, Reference, make_reference

# The same examples in every run, on machines of any speed.
settings.register_profile(
    "seeded", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell runs the tests in its background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def default_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, in which the default model is made once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESERVE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def reference_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Gives a reference by its name, and makes it the first time."""
    return functools.cache(lambda name: make_reference(tmp_path_factory.mktemp(name), (SHAPES | DIVISIBLE)[name]))


@pytest.fixture(scope="session", params=list(SHAPES))
def reference(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> Reference:
    """Each in turn."""
    return reference_named(request.param)


@pytest.fixture(scope="session")
def plain(reference_named: Callable[[str], Reference]) -> Reference:
    """One ordinary shape, for what does not depend on shapes."""
    return reference_named("mixtral")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that wait for functions to run."""
    shared = Ranks()
    yield shared
    shared.close()
