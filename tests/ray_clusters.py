"""A Ray cluster of this host alone, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def ray_with_cpus(num_cpus: int) -> Iterator[None]:
    """Start a cluster that has this many CPUs, as far as Ray knows. Engines use it."""
    ray = pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False)
        try:
            yield
        finally:
            ray.shutdown()
