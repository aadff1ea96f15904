"""Lets processes behave as on a POSIX system other than Linux, with the portable forms of what Linux alone offers.

`tests/sitecustomize.py` does so in each process of moeserve that a test starts with MOESERVE_TEST_OTHER_SYSTEM set.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from moeserve.processes import local_sockets

if TYPE_CHECKING:
    from ranks import Place

ENVIRONMENT = {"MOESERVE_TEST_OTHER_SYSTEM": "1"}
ONLY_PROCESSES = {"MOESERVE_TEST_OTHER_SYSTEM": "processes"}  # for processes without tensors, which need no torch


def pretend(patch: pytest.MonkeyPatch, *, only_processes: bool = False) -> None:
    """Take pidfds, the fork server, memfds, sleeping on words, abstract names and sums in C++ from this process."""
    patch.delattr(os, "pidfd_open")
    patch.setattr(local_sockets, "HAS_ABSTRACT_NAMES", False)
    if not only_processes:
        from moeserve.distributed import shared_memory
        from moeserve.processes import memory_file

        patch.setattr(memory_file, "HAS_MEMFD", False)
        patch.setattr(shared_memory, "NAPS", True)
        patch.setattr(shared_memory, "NATIVE_DTYPES", ())  # as on a processor without kernels


def call(place: Place, target: str, arguments: dict[str, Any]) -> Any:
    """Call a `module:function` of a test on a rank as on another system. See `ranks.py`."""
    module, _, name = target.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        return getattr(importlib.import_module(module), name)(place, **arguments)
