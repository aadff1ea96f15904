"""A Ray cluster of this host alone, for tests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

# Ray gives processes of actors the priority 15, with which they make no progress on a machine that does other work.
PRIORITY = {"RAY_worker_niceness": "0"}


@contextlib.contextmanager
def ray_with_cpus(num_cpus: int, **runtime_env: str) -> Iterator[None]:
    """Start a cluster that has this many CPUs, as far as Ray knows. Engines use it."""
    ray = pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        for name, value in PRIORITY.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            runtime_env=runtime_env,
            logging_level=logging.ERROR,
        )
        try:
            yield
        finally:
            ray.shutdown()
