"""The memory of a rank that a sleep returns to the system, besides that of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moeserve.memory import free_pages, free_pool
from moeserve.worker.step_runner import StepRunner


def free_caches(caches: Iterable[Any], step_runner: StepRunner) -> None:
    """Return the memory of caches and of outputs. No step may run, and no request may need what the caches hold."""
    for cache in caches:
        for tensor in cache.tensors:
            free_pages(tensor)
    step_runner.free_memory()
    free_pool()
